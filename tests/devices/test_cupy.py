"""CuPy's arrays in calls and kernels: on GPUs, and over the memory of emulated devices.

Without NVIDIA's driver CuPy can be imported and its array class works, but an array cannot tell its
device and stream, and nothing can be allocated. `CupyWithoutDriver` replaces these parts.
"""

import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

# pytest finds the fixture by name, so that it looks unused.
from group_devices import machine_fixture, numbers, odd, on  # noqa: F401 - fixture

import pycomm
from pycomm import errors, kernels
from pycomm._core_api import arrays, devices

cupy: Any
try:
    import cupy
except ImportError:  # `make test` does not install it, and leaves these tests out
    cupy = None

pytestmark = [
    pytest.mark.skipif(cupy is None, reason="needs CuPy: pip install cupy-cuda13x"),
    pytest.mark.timeout(300),
]


class CupyWithoutDriver(ExitStack):
    """CuPy's arrays lie in the memory of emulated devices; each thread is a rank with a device."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = threading.local()

    def __enter__(self) -> "CupyWithoutDriver":
        patch = self.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(cupy.cuda, "Device", self.device)
        patch.setattr(cupy.cuda, "get_current_stream", self.stream)
        patch.setattr(cupy, "empty", self.empty)
        patch.setattr(cupy.ndarray, "__cuda_array_interface__", property(self.interface))
        patch.setattr(cupy.ndarray, "__dlpack_device__", lambda x: (2, x.data.device_id))
        return self

    def begin(self, device: Any) -> None:
        """In a rank's thread."""
        self.rank.device, self.rank.current = device, None

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.rank.current = index
        yield
        self.rank.current = None

    def stream(self) -> Any:
        assert self.rank.current == self.rank.device.index, "the stream of another device"
        return types.SimpleNamespace(ptr=self.rank.device.stream)

    def empty(self, shape: Any, dtype: str) -> Any:
        assert self.rank.current == self.rank.device.index, "memory of another device"
        return self.over(self.rank.device.empty(shape, dtype))

    @staticmethod
    def interface(x: Any) -> dict[str, Any]:
        strides = None if x.flags.c_contiguous else x.strides
        shown = {"data": (x.data.ptr, False), "strides": strides, "stream": 1, "version": 3}
        return {"shape": x.shape, "typestr": x.dtype.str, **shown}

    @staticmethod
    def over(there: Any) -> Any:
        """An array of CuPy on the memory of an emulated device's array."""
        memory = cupy.cuda.UnownedMemory(there.at, there.nbytes, there, there.place.index)
        return cupy.ndarray(there.shape, there.dtype, cupy.cuda.MemoryPointer(memory, 0))


def put(device: Any, x: Any) -> Any:
    """A copy of x as an array of CuPy on the rank's device."""
    if device.name == "emulated":
        return CupyWithoutDriver.over(device.put(x))
    with cupy.cuda.Device(device.index):
        return cupy.asarray(x)


def get(device: Any, x: Any) -> Any:
    """The elements, after the stream of the call."""
    assert type(x) is cupy.ndarray
    if device.name == "cuda":
        return cupy.asnumpy(x)
    data = device.runtime.get(x.data.ptr, x.nbytes, device.stream)
    return np.frombuffer(data, x.dtype).reshape(x.shape)


def run(machine: Any, body: Any, *args: Any) -> list[Any]:
    if not machine.emulated:
        return list(machine.run(2, body, *args))
    with CupyWithoutDriver() as replaced:

        def begun(group: pycomm.Group, device: Any) -> Any:
            replaced.begin(device)
            return body(group, device, *args)

        return list(machine.run(2, begun))


def calls(group: pycomm.Group, device: Any) -> list[Any]:
    x = put(device, numbers(group.rank))
    assert pycomm.all_reduce(x) is x
    rows = pycomm.all_gather(put(device, numbers(group.rank, (2, 3), "float16")))
    with pytest.raises(errors.InvalidArgument, match=r"cupy\.ascontiguousarray"):
        pycomm.all_reduce(rows[:, :, 1])
    work = pycomm.broadcast(put(device, numbers(group.rank, dtype="int64")), 1, async_op=True)
    return [get(device, found) for found in (x, rows, work.result())]


def test_collectives(machine):
    whole = [numbers(rank) for rank in range(2)]
    small = [numbers(rank, (2, 3), "float16") for rank in range(2)]
    for x, rows, sent in run(machine, calls):
        np.testing.assert_array_equal(x, sum(whole))
        np.testing.assert_array_equal(rows, small)
        assert rows.dtype == "float16"
        np.testing.assert_array_equal(sent, numbers(1, dtype="int64"))


def largest(group: pycomm.Group, device: Any) -> None:
    x = odd(group.rank, 5000, "float32")
    with ExitStack() as stack:
        if device.name == "emulated":
            stack.enter_context(devices.override_kernels("cuda", device.module.kernels))
        found = kernels.topk(put(device, x), 50)
    for one, wanted in zip(found, kernels.topk(x, 50), strict=True):
        np.testing.assert_array_equal(get(device, one), wanted)


@on("emulated", "cuda")
def test_kernel(machine):
    run(machine, in_turn)


def in_turn(group: pycomm.Group, device: Any) -> None:
    """`largest` in one rank after the other: the override is process-wide."""
    for rank in range(group.size):
        if rank == group.rank:
            largest(group, device)
        pycomm.barrier(group=group)


def dlpack(group: pycomm.Group, device: Any) -> Any:
    import torch

    there = device.put(numbers(group.rank))
    x = cupy.from_dlpack(there)
    pycomm.all_reduce(x)  # on CuPy's current stream
    back = torch.from_dlpack(x)  # torch's current stream waits for CuPy's
    assert back.data_ptr() == there.data_ptr()
    return device.get(back)


@on("cuda", "cuda, shared")
def test_dlpack_between_cupy_and_torch(machine):
    for found in run(machine, dlpack):
        np.testing.assert_array_equal(found, numbers(0) + numbers(1))


def test_array_of_cupy_is_not_taken_for_one_in_host_memory():
    here = np.arange(8, dtype=np.float32)
    memory = cupy.cuda.UnownedMemory(here.ctypes.data, here.nbytes, here, 0)
    x = cupy.ndarray(here.shape, here.dtype, cupy.cuda.MemoryPointer(memory, 0))
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(x)
    with CupyWithoutDriver():
        assert arrays.plain(x) is x
        assert arrays.view(x, write=True).device == arrays.Device("cuda", 0)
