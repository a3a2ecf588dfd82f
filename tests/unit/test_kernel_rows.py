"""Lists of arrays are checked in one pass, or one by one if that pass cannot decide: with the same
result. No state is kept between calls.
"""

import gc

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_devices import same
from properties import SETTINGS

from pycomm import _core, kernels
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.kernels import inputs
from pycomm.kernels.rows import Rows

F32 = np.float32


def read_only():
    x = np.ones(4, F32)
    x.flags.writeable = False
    return x


class Subclass(torch.Tensor):
    pass


# Of one list or two; whether one pass is enough, or the text of the error.
PLAIN = {
    "torch": [[torch.ones(4), torch.ones(2, 3)], [torch.ones(4), torch.ones(2, 3)]],
    "NumPy": [[np.ones(4, F32), np.ones((2, 3), F32)], [np.ones(4, F32), np.ones((2, 3), F32)]],
    "both": [[torch.ones(4)], [np.ones(4, F32)]],
    "parameters": [[torch.nn.Parameter(torch.ones(2, 2))], [torch.ones(2, 2)]],
    "one flat": [[torch.ones(2, 3)], [torch.ones(6)]],
    "a part of another": [[torch.ones(10)[2:5]], [np.ones(10, F32)[4:7]]],
    "no elements": [[torch.ones(0), torch.ones(0, 3)]],
    "a number": [[torch.tensor(1.0), np.ones((), F32)]],
    "dtypes by list": [[torch.ones(4)], [torch.ones(4, dtype=torch.bfloat16)]],
    "float16 and float64": [[np.ones(4, np.float16)], [np.ones(4)]],
}
ONE_BY_ONE = {
    "a subclass": [[torch.ones(4).as_subclass(Subclass)]],
    "a memory map": [[np.ones(4, F32).view(np.memmap)]],
    "read only, and read": [[np.ones(4, F32)], [read_only()]],
    "flat, then two shapes": [[torch.ones(6)], [torch.ones(2, 3)], [torch.ones(3, 2)]],
}
WRONG = {
    "dtypes": ([[torch.ones(4), torch.ones(4).double()]], r"a\[1\]: got dtype float64"),
    "counts": ([[torch.ones(4)], [torch.ones(5)]], r"a has shape \(4,\), but b has \(5,\)"),
    "shapes": ([[torch.ones(2, 3)], [torch.ones(3, 2)]], "shape"),
    "number of dimensions": ([[torch.tensor(1.0)], [torch.ones(1, 1)]], "shape"),
    "transposed": ([[torch.ones(2, 3).t()]], "not contiguous"),
    "every other": ([[np.ones(8, F32)[::2]]], "not contiguous"),
    "negated": ([[torch._neg_view(torch.ones(4))]], "not contiguous"),
    "one element for all": ([[torch.ones(1).expand(4)]], "not contiguous"),
    "integers": ([[torch.ones(4).int()]], "a: got dtype int32"),
    "complex": ([[torch.ones(4, dtype=torch.complex64)]], "complex"),
    "sparse": ([[torch.ones(4).to_sparse()]], "layout"),
    "meta": ([[torch.ones(4, device="meta")]], "meta"),
    "read only, and written": ([[read_only()], [np.ones(4, F32)]], "read-only"),
    "no array": ([[1.5]], "expected an array"),
    "no array behind one": ([[torch.ones(4), None]], r"a\[1\]: expected an array"),
    "more than an index counts": ([[np.empty(2**31, np.float16)]], "2147483647"),
    "foreign byte order": ([[np.ones(4, ">f4")]], "byte order"),
}  # fmt: skip


def looked_at(lists):
    named = dict(zip("abc", [list(x) for x in lists], strict=False))
    dtypes = dict.fromkeys(named, inputs.FLOATS)
    found = Rows.of(named, dtypes, "call", write=("a",))
    memory = [[x.tolist() for x in spans.words] for spans in found.spans(*named)]
    return found.words.tolist(), memory, found.dtypes, found.device, found.flat


@pytest.mark.parametrize("name", PLAIN | ONE_BY_ONE)
def test_one_pass_accepts_the_same_lists_as_the_slow_check(name, monkeypatch):
    lists = (PLAIN | ONE_BY_ONE)[name]
    found = looked_at(lists)
    assert (_core.rows(tuple(lists)) is not None) == (name in PLAIN)
    monkeypatch.setattr(_core, "rows", lambda lists: None)
    assert looked_at(lists) == found
    first = lists[0][0]
    assert found[0][0][-1] == (first.numel() if isinstance(first, torch.Tensor) else first.size)


@pytest.mark.parametrize("name", WRONG)
def test_lists_rejected_by_one_pass_raise_with_the_reason(name):
    lists, message = WRONG[name]
    with pytest.raises((InvalidArgument, Unsupported), match=message):
        looked_at(lists)


def test_one_pass_on_a_device(device):
    """If arrays are in host memory or in torch tensors on a GPU, nothing is checked twice."""
    x = [device.put(np.ones(n, F32), torch_too=True) for n in (3, 5)]
    found = Rows.try_fast({"x": x})
    assert found is not None
    assert found.words.tolist() == [[one.data_ptr(), one.numel()] for one in x]
    assert found.device.kind == x[0].device.type
    assert found.device.index == (x[0].device.index or 0)


def stepped(u, v, grad):
    """A step that sets v = grad, and takes all of it out of the first arrays."""
    return kernels.dgc_step(grad, u, v, [len(u[0]), 0], momentum=0.0)


def test_no_array_state_is_kept_between_calls():
    """The same lists with tensors that were resized, given other memory or dtypes, or replaced."""
    u, v, grad = ([torch.zeros(n) for n in (4, 6)] for _ in range(3))
    for g in grad:
        g.fill_(2)
    assert stepped(u, v, grad)[1][0].tolist() == [2] * 4
    before = [x[0].untyped_storage() for x in (u, v, grad)]
    for x in (u, v, grad):
        x[0].set_(torch.full((3,), float(x is grad) * 5))
    assert stepped(u, v, grad)[1][0].tolist() == [5] * 3
    assert v[1].tolist() == [4] * 6  # of both steps: it sends nothing
    del before
    grad[0].resize_(2)
    with pytest.raises(InvalidArgument, match="shape"):
        stepped(u, v, grad)
    grad[0].data = torch.ones(3, dtype=torch.float64)
    with pytest.raises(InvalidArgument, match=r"grad\[1\]: got dtype float32, expected float64"):
        stepped(u, v, grad)
    grad[0] = torch.full((3,), 7.0)
    gc.collect()  # the earlier memory was freed
    assert stepped(u, v, grad)[1][0].tolist() == [7] * 3
    v[0] = u[0]
    with pytest.raises(InvalidArgument, match="share memory"):
        stepped(u, v, grad)


@pytest.mark.parametrize("numpy_too", [False, True])
def test_results_in_one_allocation_equal_results_in_buffers(numpy_too):
    """The results that a call allocates are one array, split; the user's buffers are separate."""
    rng = np.random.default_rng(0)
    sizes, ks = (300, 7, 1, 5000), [3, 0, 1, 40]
    made = [[rng.standard_normal(n).astype(F32) for n in sizes] for _ in range(3)]
    kind = np.array if numpy_too else torch.tensor

    def step(**buffers):
        grad, *mine = ([kind(x) for x in each] for each in made)
        found = kernels.dgc_step(grad, *mine, ks, momentum=0.9, **buffers)
        return [np.asarray(x) for each in (*found, *mine) for x in each]

    def buffers(dtype):
        return [kind(np.zeros(k, dtype)) for k in ks]

    given = {"indices": buffers(np.int32), "values": buffers(F32), "u_values": buffers(F32)}
    for one, other in zip(step(), step(**given), strict=True):
        same(one, other)
    for name, wrong in (("indices", F32), ("values", np.float64)):
        with pytest.raises(InvalidArgument, match=f"invalid {name}.*: got dtype .*, expected"):
            step(**given | {name: buffers(wrong)})
    with pytest.raises(InvalidArgument, match=r"got shape \(3, 1\), expected \(3,\)"):
        step(**given | {"values": [x.reshape(-1, 1) for x in buffers(F32)]})
    with pytest.raises(InvalidArgument, match="got 3 arrays, expected one for each of 4 k"):
        step(**given | {"values": buffers(F32)[1:]})
    with pytest.raises(InvalidArgument, match="share memory"):
        step(**given | {"values": given["u_values"]})


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 1)), max_size=6)


@SETTINGS
@given(SPANS)
@example([(0, 10, 0), (1, 2, 0), (5, 1, 1)])  # in the first of the arrays that are read
def test_aliasing_arrays_are_detected(spans):
    bytes_of = [(set(range(begin, begin + n)), written) for begin, n, written in spans]
    tables = [inputs.Table([s[:2] for s in spans if s[2] == writes]) for writes in (1, 0)]
    wanted = any(
        a & b and (writes or also_writes)
        for i, (a, writes) in enumerate(bytes_of)
        for b, also_writes in bytes_of[:i]
    )
    assert _core.share_memory(*([table.address] for table in tables)) == wanted
