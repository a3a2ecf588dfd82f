"""Valid arrays: kinds, dtypes, strides, sizes; and errors for invalid ones."""

import array
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks

import pycomm
from pycomm import Group, errors
from pycomm._core_api import arrays, device_groups
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.testing import run_ranks

torch = pytest.importorskip("torch")


def strided(kind: str) -> tuple[Any, Any]:
    """A (3, 4) array of int64 inside a larger one, in an unusual layout; and the larger one."""
    base = np.zeros((9, 12), np.int64)
    views = {
        "plain": lambda b: b[:3, :4].copy(),
        "rows": lambda b: b[1:7:2, 2:6],
        "columns": lambda b: b[3:6, 1:12:3],
        "transposed": lambda b: b[2:6, 4:7].T,
        "backwards": lambda b: b[8:5:-1, 11:7:-1],
        "fortran": lambda b: np.asfortranarray(b[:3, :4]),
    }
    view = views[kind](base)
    assert view.shape == (3, 4)
    return view, base if view.base is base else view


LAYOUTS = ["plain", "rows", "columns", "transposed", "backwards", "fortran"]


@on_ranks(3)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("async_op", [False, True])
def test_any_strides_give_correct_results_and_write_nothing_else(
    group: Group, kind: str, async_op: bool
) -> None:
    wanted = np.arange(12).reshape(3, 4)
    view, base = strided(kind)
    base[...] = -5
    view[...] = wanted * (group.rank + 1)
    outside = base.sum() - view.sum()
    got = pycomm.all_reduce(view, group=group, async_op=async_op)
    if async_op:
        got = got.result()
    assert got is view
    assert base.sum() - view.sum() == outside
    assert np.array_equal(view, wanted * 6)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_inputs_and_outputs_of_any_strides_gather_and_scatter(kind: str) -> None:
    def fn(group: Group) -> Any:
        view, _ = strided(kind)
        view[...] = np.arange(12).reshape(3, 4) + 100 * group.rank
        before = view.copy()
        out = np.zeros((4, 3, 2), np.int64).T  # (2, 3, 4), unusual strides
        assert pycomm.all_gather(view, out, group=group) is out
        assert np.array_equal(view, before)
        part = np.zeros((4, 6), np.int64).T[::2]
        pycomm.reduce_scatter(out, out=part, group=group)
        return out.copy(), part.copy()

    base = np.arange(12).reshape(3, 4)
    for rank, (out, part) in enumerate(run_ranks(2, fn)):
        assert np.array_equal(out, [base, base + 100])
        assert np.array_equal(part, 2 * (base + 100 * rank))


@on_ranks(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(6, 8)[::2, ::3],
        lambda: torch.zeros(3, 3).t(),
        lambda: torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last),
        lambda: torch.zeros(4, dtype=torch.complex64).conj().imag,
        lambda: torch._neg_view(torch.zeros(4)),
        lambda: torch.nn.Parameter(torch.zeros(3, 3)),
        lambda: torch.zeros(3, 3, requires_grad=True).detach()[:, 1],
    ],
)
def test_torch_layouts(group: Group, make: Callable[[], Any]) -> None:
    x = make()
    with torch.no_grad():
        x.copy_(torch.arange(x.numel()).reshape(x.shape))
    pycomm.all_reduce(x, "product", group=group)  # sums would not show a lost minus sign
    got, once = x.detach().clone(), torch.arange(x.numel()).reshape(x.shape)
    assert torch.equal(got, 1.0 * once * once)


@on_ranks("n")
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 1, 1)])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_zero_dimensions_and_zero_elements(group: Group, shape: tuple[int, ...], n: int) -> None:
    x, t = np.ones(shape, np.float32), torch.ones(shape)
    pycomm.all_reduce(x, group=group)
    pycomm.all_reduce(t, group=group)
    pycomm.broadcast(x, n - 1, group=group)
    gathered = pycomm.all_gather(x, group=group)
    row = pycomm.reduce_scatter(gathered, group=group)
    assert x.shape == row.shape == tuple(t.shape) == shape
    assert (x == n).all()
    assert bool((t == n).all())
    assert gathered.shape == (n, *shape)
    assert (row == n * n).all()


@on_ranks(2)
def test_inputs_that_alias_the_output(group: Group) -> None:
    """x may be out[rank], or any other view of out: then it is copied first."""
    out = np.zeros((2, 4), np.int32)
    out[group.rank] = group.rank + 1
    pycomm.all_gather(out[group.rank], out, group=group)
    shifted = np.zeros(10, np.int32)
    shifted[3:7] = group.rank + 1
    pycomm.all_gather(shifted[3:7], shifted[:8].reshape(2, 4), group=group)
    rows = np.array([[1, 2], [3, 4]], np.int32)
    pycomm.reduce_scatter(rows, out=rows[1 - group.rank], group=group)
    assert out.tolist() == [[1] * 4, [2] * 4]
    assert shifted.tolist() == [1] * 4 + [2] * 4 + [0, 0]
    assert rows[1 - group.rank].tolist() == [[2, 4], [6, 8]][group.rank]


@on_ranks(2)
def test_buffer_protocol_objects_are_arrays(group: Group) -> None:
    text, numbers = bytearray(b"\x01\x02"), array.array("d", [1.0, 2.0])
    assert pycomm.all_reduce(text, group=group) is text
    pycomm.all_reduce(numbers, group=group)
    pycomm.all_reduce(memoryview(numbers), group=group)
    assert bytes(text) == b"\x02\x04"
    assert list(numbers) == [4.0, 8.0]
    assert pycomm.all_gather(b"ab", group=group).tolist() == [[97, 98]] * 2


class Dlpack:
    """An array that supports only DLPack, on the device of this number."""

    def __init__(self, device: int = 1) -> None:
        self.memory, self.device = np.arange(3.0), device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **options: Any) -> Any:
        assert self.device == 1, "memory of a device was asked for"
        return self.memory.__dlpack__(**options)


class CudaArray(Dlpack):
    """Like CuPy's: has a device pointer, and copies to host memory only by get()."""

    def __init__(self) -> None:
        super().__init__(2)

    @property
    def __cuda_array_interface__(self) -> Any:
        return {"shape": (3,), "typestr": "<f8", "data": (0x1000, False), "version": 3, "stream": 1}

    @property
    def shape(self) -> tuple[int, ...]:
        return (3,)

    def __array__(self, *_: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")


@on_ranks(2)
def test_dlpack_to_and_from_torch(group: Group) -> None:
    """Of host memory: without a copy, as CuPy's arrays are exchanged on a device."""
    x = Dlpack()
    x.memory = torch.arange(3.0)
    rows = pycomm.all_gather(x, group=group)
    back = torch.from_dlpack(rows)
    assert back.data_ptr() == rows.ctypes.data
    pycomm.all_reduce(back, group=group)  # in the memory of rows
    assert rows.tolist() == [[0.0, 2.0, 4.0]] * 2
    if np.from_dlpack(x).flags.writeable:  # NumPy 2.1 and newer
        pycomm.all_reduce(x, group=group)
        assert x.memory.tolist() == [0.0, 2.0, 4.0]


class NoGpu:
    """Replaces _cuda."""

    @staticmethod
    def open_device(_: int, __: Any) -> Any:
        raise Unsupported("no GPU here")


def test_device_arrays_are_rejected_as_inputs_and_outputs() -> None:
    def fn(group: Group) -> None:
        for call in (
            lambda: pycomm.all_reduce(CudaArray()),
            lambda: pycomm.gather(CudaArray(), 1 - group.rank),
            lambda: pycomm.reduce_scatter(np.zeros((2, 3)), out=CudaArray()),
            lambda: pycomm.send(CudaArray(), 1 - group.rank),
        ):
            with pytest.raises(errors.Error, match=r"no GPU here|x is on \w+(:0)?, but out is on"):
                call()

    with device_groups.override_device_module(NoGpu):
        run_ranks(2, fn)


def test_numpy_with_bfloat16() -> None:
    kind = pytest.importorskip("ml_dtypes").bfloat16

    def fn(group: Group) -> Any:
        x = np.array([1, 2.5, -3], kind)
        rows = pycomm.all_gather(x, group=group)
        assert rows.dtype == kind
        assert np.array_equal(rows[1 - group.rank], x)
        odd = np.zeros((3, 2), kind)
        odd[:, 0] = x
        pycomm.all_reduce(odd[:, 0], group=group)
        return odd.astype(np.float32).tolist()

    assert run_ranks(2, fn) == [[[2, 0], [5, 0], [-6, 0]]] * 2


def resized(room: int) -> Any:
    """A tensor whose storage has fewer bytes, as FSDP leaves it."""
    x = torch.zeros(6)
    x.untyped_storage().resize_(room)
    return x


def read_only() -> Any:
    x = np.zeros(3)
    x.flags.writeable = False
    return x


REFUSED = {
    "read-only": (read_only, InvalidArgument, "read-only"),
    "bytes": (lambda: b"abc", InvalidArgument, "read-only"),
    "broadcast": (
        lambda: np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,)),
        InvalidArgument,
        "share memory",
    ),
    "overlapping": (
        lambda: np.lib.stride_tricks.as_strided(np.zeros(9), (3, 3), (8, 8)),
        InvalidArgument,
        "share memory",
    ),
    "expanded": (lambda: torch.zeros(1).expand(3), InvalidArgument, "share memory"),
    "no interface": (lambda: Dlpack(2), Unsupported, r"Dlpack in the memory of a device \(CUDA\)"),
    "rocm array": (lambda: Dlpack(10), Unsupported, r"device \(ROCm\)"),
    "unknown device": (lambda: Dlpack(99), Unsupported, r"device \(kind 99\)"),
    "list": (lambda: [1, 2], InvalidArgument, "expected an array"),
    "tuple": (lambda: (2**20, "float32", 1, None), InvalidArgument, "expected an array"),
    "no storage": (
        lambda: resized(0),
        InvalidArgument,
        "storage of 24 bytes has one of 0",
    ),
    "small storage": (
        lambda: resized(8),
        InvalidArgument,
        "24 bytes has one of 8",
    ),
    "no memory": (
        lambda: torch._efficientzerotensor(3),
        InvalidArgument,
        "without memory",
    ),
    "number": (lambda: np.float32(1), InvalidArgument, "expected an array"),
    "none": (lambda: None, InvalidArgument, "expected an array"),
    "masked": (lambda: np.ma.ones(3), InvalidArgument, "masked array"),
    "complex numpy": (lambda: np.zeros(3, complex), Unsupported, "view_as_real"),
    "complex torch": (lambda: torch.zeros(3, dtype=torch.complex64), Unsupported, "view_as_real"),
    "uint32": (lambda: np.zeros(3, np.uint32), Unsupported, "uint32"),
    "object": (lambda: np.array([None]), Unsupported, "object"),
    "record": (lambda: np.zeros(2, [("a", "i4")]), Unsupported, "unsupported dtype"),
    "byte order": (lambda: np.zeros(3, ">f4"), Unsupported, "byte order"),
    "meta": (lambda: torch.zeros(3, device="meta"), Unsupported, "device meta"),
    "sparse": (lambda: torch.eye(3).to_sparse(), Unsupported, "layout"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8),
        Unsupported,
        "quantized",
    ),
    "float8": (lambda: torch.zeros(3).to(torch.float8_e4m3fn), Unsupported, "float8"),
}


@on_ranks(2)
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_rejected_arrays_raise_with_the_reason_and_the_group_continues(
    group: Group, case: str
) -> None:
    make, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        pycomm.all_reduce(make(), group=group)
    assert pycomm.all_reduce(np.ones(2), group=group).tolist() == [2.0, 2.0]


@on_ranks(2)
def test_overlapping_inputs_are_not_written(group: Group) -> None:
    got = pycomm.all_gather(torch.tensor([1.0 + group.rank]).expand(3), group=group)
    assert got.tolist() == [[1.0] * 3, [2.0] * 3]


def test_random_layouts_never_write_outside() -> None:
    """Slices of every kind of a guarded block: correct inside, unchanged outside."""
    rng = random.Random(5)

    def one_slice(length: int) -> slice:
        start, stop = sorted(rng.sample(range(length + 1), 2))
        step = rng.choice([1, 2, 3])
        return slice(start, stop, step) if rng.random() < 0.6 else slice(stop - 1, None, -step)

    cuts = [tuple(one_slice(6) for _ in range(3)) for _ in range(60)]

    def fn(group: Group) -> Any:
        for cut in cuts:
            block = np.full((6, 6, 6), -1, np.int16)
            block[cut] = group.rank + 1
            wanted = np.where(block > 0, 3, -1)
            pycomm.all_reduce(block[cut], group=group)
            assert np.array_equal(block, wanted), cut

    run_ranks(2, fn)


def test_counts_exceed_31_bits() -> None:
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (1 << 33,), (1,), writeable=False)
    one = arrays.view(huge)
    assert one.count == 1 << 33
    assert one.nbytes == 1 << 33
