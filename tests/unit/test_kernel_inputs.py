"""Each invalid input of the kernels raises with a reason, and nothing changes. Threads, forks,
devices.
"""

import subprocess
import sys

import numpy as np
import pytest
import torch
from finished import finished
from paths import ROOT

import pycomm
from pycomm import _core, kernels, reference
from pycomm._core_api import devices
from pycomm.errors import InvalidArgument, Unsupported

F32 = np.float32


def arrays(count=100, dtype=F32):
    return {name: np.full(count, i + 1, dtype) for i, name in enumerate(("grad", "u", "v"))}


WRONG_STEPS = {
    "shape": ({"u": np.ones((10, 10), F32), "v": np.ones((20, 5), F32)}, "shape"),
    "count": ({"grad": np.ones(99, F32)}, "shape"),
    "dtype of u": ({"u": np.ones(100, np.float16)}, "float32 or float64"),
    "dtype of v": ({"v": np.ones(100)}, "got dtype float64, expected float32"),
    "float64 gradient": ({"grad": np.ones(100)}, "float64 needs float64"),
    "integers": ({"grad": np.ones(100, np.int32)}, "got dtype int32, expected"),
    "no array": ({"grad": 3.0}, "expected an array"),
    "strides": ({"grad": np.ones(200, F32)[::2]}, "not contiguous"),
    "torch strides": ({"grad": torch.ones(200)[::2]}, "not contiguous"),
    "meta device": ({"grad": torch.ones(100, device="meta")}, "not supported"),
    "read only": ({"v": np.broadcast_to(F32(1), 100).copy()}, None),
    "k too large": ({"k": 101}, "0..100"),
    "k negative": ({"k": -1}, "0..100"),
    "k no number": ({"k": 1.5}, "an integer in 0"),
    "list of k": ({"k": [1]}, "expected a number, as u is one array"),
    "momentum": ({"momentum": float("nan")}, "finite"),
    "scale": ({"scale": float("inf")}, "finite"),
    "scale array": ({"scale": np.ones(2, F32)}, "got 2 numbers, expected one for each of 1"),
    "decay without weight": ({"weight_decay": 0.1}, "invalid weight: got None"),
    "weight dtype": ({"weight_decay": 1, "weight": np.ones(100, np.float16)}, "got dtype float16"),
    "found_inf": ({"found_inf": np.zeros(2, F32)}, "got 2 elements, expected one"),
    "indices dtype": ({"indices": np.zeros(5, np.int64)}, "expected int32"),
    "values length": ({"values": np.zeros(6, F32)}, "got shape"),
    "workspace size": ({"workspace": np.zeros(1, np.uint8)}, "got 1 bytes, expected"),
    "lists of other lengths": (
        {"grad": [np.ones(3, F32)], "u": [np.ones(3, F32)] * 2, "v": [np.ones(3, F32)] * 2},
        "expected one length",
    ),
    "one list": ({"u": [np.ones(100, F32)]}, "expected a list"),
    "no tensors": ({"grad": [], "u": [], "v": []}, "empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_wrong_steps(name):
    changed, message = WRONG_STEPS[name]
    given = {**arrays(), "k": 5, "momentum": 0.9, **changed}
    if name == "read only":
        given["v"].flags.writeable = False
        message = "read-only"
    before = {n: x.copy() for n, x in given.items() if isinstance(x, np.ndarray)}
    with pytest.raises((InvalidArgument, Unsupported), match=message):
        kernels.dgc_step(**given)
    for n, x in before.items():
        assert np.array_equal(given[n], x), n


@pytest.mark.parametrize("written", ["indices", "values", "workspace"])
def test_what_topk_writes_does_not_share_memory_with_its_input(written):
    x = np.ones(100, np.float32)
    wanted = {"indices": np.int32, "values": np.float32, "workspace": np.uint8}
    with pytest.raises(InvalidArgument, match="share memory"):
        kernels.topk(x, 100, **{written: x.view(wanted[written])})


def test_arrays_that_share_memory():
    whole = np.ones(300, F32)
    u, v = whole[:100], whole[50:150]
    with pytest.raises(InvalidArgument, match="share memory"):
        kernels.dgc_step(np.ones(100, F32), u, v, 5, momentum=0.9)
    with pytest.raises(InvalidArgument, match="share memory"):
        kernels.dgc_step(u, u, whole[200:], 5, momentum=0.9)
    buffer = np.zeros(10, np.int32)
    with pytest.raises(InvalidArgument, match="share memory"):
        kernels.dgc_step(
            np.ones(100, F32), u, whole[200:], 5, momentum=0.9,
            indices=buffer[:5], values=buffer[3:8].view(F32),
        )  # fmt: skip
    with pytest.raises(InvalidArgument, match="share memory"):
        kernels.reduce_(u, [v, v])
    with pytest.raises(InvalidArgument, match="share memory"):
        kernels.cast(u, "float32", out=v)
    assert (whole == 1).all()
    same = np.ones(100, F32)  # read twice, never written: valid
    kernels.dgc_step(same, u, whole[200:], 5, momentum=0.9, weight=same, weight_decay=0.1)


def test_more_elements_than_an_index_counts():
    """2^31 elements: memory that is never touched, so that it costs nothing."""
    x = np.empty(2**31, np.float16)
    for call in (lambda: kernels.topk(x, 1), lambda: kernels.norm(x)):
        with pytest.raises(InvalidArgument, match="2147483647"):
            call()
    halves = [np.empty(2**30, F32) for _ in range(2)]
    with pytest.raises(InvalidArgument, match="together"):
        kernels.decode_sum(halves, [])
    with pytest.raises(InvalidArgument, match="together"):
        kernels.dgc_step(halves, halves, halves, 1, momentum=0.9)


WRONG_CALLS = {
    "topk": (lambda: kernels.topk(np.ones(3, F32), 4), "0..3"),
    "topk of integers": (lambda: kernels.topk(np.ones(3, int), 1), "got dtype int64, expected"),
    "threshold": (lambda: kernels.threshold(np.ones(3, F32), 0), "at least 1"),
    "mask of nothing": (
        lambda: kernels.momentum_mask(None, None, np.zeros(1, np.int32)), "neither"),
    "values": (
        lambda: kernels.scatter_add(np.ones(3, F32), np.zeros(2, np.int32), np.ones(1, F32)),
        "2 indices and 1"),
    "index dtype": (
        lambda: kernels.scatter_add(np.ones(3, F32), np.zeros(1, np.int64), np.ones(1, F32)),
        "expected int32"),
    "mixed packets": (
        lambda: kernels.decode_sum(np.ones(3, F32), [
            (np.zeros(1, np.int32), np.ones(1, F32)), (np.zeros(1, np.int32), np.ones(1))]),
        "expected one"),
    "foreign packet": (
        lambda: kernels.decode_sum(np.ones(3, F32), [
            kernels.encode(np.zeros(1, np.int32), np.ones(1, F32), 9)]), "of an array of 9"),
    "packet of halves": (
        lambda: kernels.decode_sum(np.ones(9, F32), [
            kernels.encode(np.zeros(1, np.int32), np.ones(1, F32), 9, "float16")]),
         "expected value_dtype='float32'"),
    "no packet": (lambda: kernels.unpack(np.zeros(40, np.uint8)), "invalid packet"),
    "value dtype": (lambda: kernels.packet_bytes(3, "int8"), "one of float16"),
    "encode k": (
        lambda: kernels.encode(np.arange(4, dtype=np.int32), np.ones(4, F32), 3), "0..3"),
    "residual": (
        lambda: kernels.encode(np.zeros(1, np.int32), np.ones(1, F32), 3, residual=np.ones(4, F32)),
        "4 elements"),
    "norm of nothing": (lambda: kernels.norm([]), "empty"),
    "norms": (lambda: kernels.norm([np.ones(2, F32), np.ones(2)]), "got dtype float64"),
    "limit": (lambda: kernels.clip_(np.ones(3, F32), -1), "at least 0"),
    "cast": (lambda: kernels.cast(np.ones(3, F32), "int8"), "one of float16"),
    "reduce": (lambda: kernels.reduce_(np.ones(3, F32), []), "empty"),
    "reduce op": (lambda: kernels.reduce_(np.ones(3, F32), [np.ones(3, F32)], "median"), "one of"),
    "reduce shape": (lambda: kernels.reduce_(np.ones(3, F32), [np.ones(4, F32)]), "shape"),
    "reduce dtype": (
        lambda: kernels.reduce_(np.ones(3, F32), [np.ones(3)]), "got dtype float64, expected"),
    "instruction set": (
        lambda: _core.set_kernel_isa("sse9"), "unknown instruction set 'sse9'; one of: "),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls(name):
    call, message = WRONG_CALLS[name]
    with pytest.raises((InvalidArgument, Unsupported), match=message):
        call()


def test_cast_to_a_dtype_without_numpy_support():
    """In a separate process: ml_dtypes, once imported, adds bfloat16 to NumPy permanently."""
    script = """
import numpy as np
from pycomm import kernels
from pycomm.errors import Unsupported
try:
    kernels.cast(np.ones(3, np.float32), "bfloat16")
except Unsupported as error:
    print(error)
"""
    done = finished([sys.executable, "-c", script], timeout=60, cwd=ROOT)
    assert "NumPy has no dtype bfloat16" in done.stdout, done.stderr


class OnCuda:
    """The interface of a CuPy array; the memory is never read."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}

    def __dlpack_device__(self):
        return 2, 1


def test_cuda_arrays_without_cuda_kernels(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"not built here.*nvcc"):
        kernels.topk(OnCuda(), 1)


def test_arrays_of_two_devices():
    with pytest.raises(InvalidArgument, match="are on cpu and cuda:1: move them"):
        kernels.dgc_step(OnCuda(), *np.ones((2, 4), F32), 1, momentum=0.9)


def test_another_module_in_place_of_a_device():
    """Emulated kernels replace those of a device temporarily."""
    calls = []

    class Emulated:
        def topk_workspace_bytes(self, count, k, dtype):
            return 64

        def topk(self, *args):
            calls.append(args)

    with devices.override_kernels("cpu", Emulated()):
        kernels.topk(np.ones(10, F32), 3)
    assert calls[0][1:3] == ("float32", 3)
    same = kernels.topk(np.ones(10, F32), 3)[0]
    assert same.tolist() == [0, 1, 2]


def test_threads_rounding_and_forks_change_no_bit():
    """The same bits with one thread, with torch's flush of subnormals, and in a forked child."""
    rng = np.random.default_rng(3)
    grad, u, v = (rng.laplace(size=3_000_000).astype(F32) * F32(1e-38) for _ in range(3))
    wanted = reference.dgc_step(grad, u, v, 3000, momentum=0.9)
    threads = _core.kernel_threads()
    try:
        for n, flush in ((1, False), (2, False), (7, True)):
            pycomm.set_num_threads(n)
            torch.set_flush_denormal(flush)
            mine = u.copy(), v.copy()
            found = kernels.dgc_step(grad, *mine, 3000, momentum=0.9)
            torch.set_flush_denormal(False)
            for got, want in zip((*mine, *found), wanted, strict=False):
                assert got.tobytes() == want.tobytes()
    finally:
        torch.set_flush_denormal(False)
        pycomm.set_num_threads(threads)


def test_forked_child_has_its_own_threads():
    code = """
import os, numpy as np, pycomm
from pycomm import kernels
pycomm.set_num_threads(4)
x = np.random.default_rng(0).standard_normal(3_000_000).astype("float32")
before = kernels.topk(x, 3000)
child = os.fork()
after = kernels.topk(x, 3000)
good = all((a == b).all() for a, b in zip(before, after))
if child == 0:
    os._exit(0 if good else 1)
assert good and os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_kernels_need_no_torch():
    code = "import sys; from pycomm import kernels, reference; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
