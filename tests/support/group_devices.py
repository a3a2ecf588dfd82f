"""Devices for the tests of device groups: NumPy arrays as inputs, one device for each rank.

A device is emulated (tests/emulator, with a fake NCCL), or a GPU of this machine, seen through
torch (gpu_devices.py). Each rank has its own device, or two share one, which NCCL rejects. With
fewer GPUs than ranks, ranks that need their own device share GPUs under NCCL, each with another
NCCL_HOSTID. A test takes a Machine, whose ranks are threads or processes. Ranks that share a GPU
are processes.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from gpu_devices import Cuda, start_cuda
from on_ranks import Test, with_parameters

import pycomm
from pycomm import errors
from pycomm._core_api import device_groups, nccl


class Array:
    """A contiguous array in the memory of an emulated device, used on the stream of its rank."""

    def __init__(self, place: Emulated, shape: tuple[int, ...], dtype: Any) -> None:
        self.place, self.shape, self.dtype = place, shape, np.dtype(dtype)
        self.itemsize = self.dtype.itemsize
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.itemsize
        self.at = place.runtime.allocate(self.nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.at, False),
            "version": 3,
            "stream": self.place.stream,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.place.index

    def __getitem__(self, rows: int | slice) -> Array:
        """A row or rows of the first dimension, in the same memory."""
        first, last, _ = (slice(rows, rows + 1) if isinstance(rows, int) else rows).indices(
            self.shape[0]
        )
        part = object.__new__(Array)
        vars(part).update(vars(self))
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        part.shape = (last - first, *self.shape[1:]) if isinstance(rows, slice) else self.shape[1:]
        part.at, part.nbytes = self.at + first * row, (last - first) * row
        return part

    def copy(self) -> Array:
        """A copy of the elements in new memory."""
        made = Array(self.place, self.shape, self.dtype)
        self.place.runtime.copy(made.at, self.at, self.nbytes, self.place.stream)
        return made


class Emulated:
    """The emulated device of a rank."""

    name = "emulated"

    def __init__(self, index: int) -> None:
        self.index = index
        self.module = programs.emulated()
        self.runtime = self.module.runtime
        self.runtime.set_device(index)
        self.stream = self.runtime.make_stream(index)
        self._gates: list[Any] = []

    def put(self, x: Any) -> Array:
        """A copy of x on the device, enqueued on its stream."""
        x = np.asarray(x)
        made = Array(self, x.shape, x.dtype)
        self.write(made, x)
        return made

    def write(self, there: Array, x: Any) -> None:
        """Writes the elements of an existing array."""
        self.runtime.put(there.at, np.asarray(x, there.dtype).tobytes(), self.stream)

    def empty(self, shape: Any, dtype: Any) -> Array:
        """An array with arbitrary contents."""
        return Array(self, tuple(np.atleast_1d(shape)), dtype)

    def get(self, x: Array) -> np.ndarray:
        """The elements after the stream finished its work."""
        data = self.runtime.get(x.at, x.nbytes, self.stream)
        return np.frombuffer(data, x.dtype).reshape(x.shape)

    def delay(self) -> Any:
        """Blocks the stream until the returned function is called."""
        self._gates.append(self.runtime.Gate(self.stream).open)
        return self._gates[-1]

    def end(self) -> None:
        """Removes all blocks: other tests use the same devices."""
        for open_gate in self._gates:
            open_gate()

    def capture(self) -> None:
        """Starts to capture the stream into a graph."""
        self.runtime.begin_capture(self.stream)

    def end_capture(self) -> Any:
        """A function that launches the captured graph on the stream."""
        graph = self.runtime.end_capture(self.stream)
        return lambda: self.runtime.launch(graph, self.stream)

    def idle(self) -> bool:
        """Whether the stream is idle; lets it make progress."""
        return bool(self.runtime.idle(self.stream))

    def counts(self) -> dict[str, int]:
        """The operations that NCCL received since the last call and started."""
        return dict(self.module.nccl.take_counts())


DEVICES = {"emulated": Emulated, "cuda": Cuda}


class Machine:
    """Runs ranks that have devices of one kind."""

    def __init__(self, kind: str) -> None:
        self.device, _, how = kind.partition(", ")
        self.emulated, self.shared = self.device == "emulated", how == "shared"
        self.own = (
            "host_staged" if self.shared else "nccl"
        )  # the transport of a call without an algorithm
        self._stack = ExitStack()

    def __enter__(self) -> Machine:
        if not self.emulated:
            torch = pytest.importorskip("torch")
            self.most = torch.cuda.device_count()
            start_cuda()
        else:
            if programs.nvcc() is None:
                pytest.skip("needs nvcc, for the headers of CUDA")
            self.most = 8
            self._stack.enter_context(EmulatedHere())
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def run(self, n: int, fn: Any, *args: Any, **options: Any) -> list[Any]:
        """Runs `fn(group, device, *args)` in each of n ranks; the results by rank."""
        needed = (n + 1) // 2 if self.shared else n
        if needed > self.most and (self.shared or not self.most):
            pytest.skip("needs a GPU" if needed == 1 else f"needs {needed} GPUs")
        indices = [rank // 2 if self.shared else rank % self.most for rank in range(n)]
        crowded = needed > self.most
        if crowded or (self.shared and not self.emulated):
            options = _processes(**options)
        device = (self.device, indices, crowded)
        return pycomm.testing.run_ranks(n, _rank, device, fn, args, **options)


def _processes(transport: str = "local", **given: Any) -> dict[str, Any]:
    """The options of ranks that share a GPU. In one process, a copy that waits for one rank could
    block another rank's work in the same hardware channel. The limits include the start of CUDA,
    and the turns that other processes have on the GPU."""
    limits = {"timeout_s": 150.0, "exit_timeout_s": 60.0, **given}
    return {**limits, "processes": True, "transport": "" if transport == "local" else transport}


def raise_failure_in_graph(device: Any, x: Any) -> None:
    """Makes a call, which reports the failure of an earlier call in a graph."""
    work = pycomm.all_reduce(x, async_op=True)
    work.wait()
    device.get(x)
    while not work.done():
        pass
    work.wait()


class LackOfNccl:
    """Ranks that find no NCCL, while the test runs: threads, or processes that run with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lacking: Sequence[int]) -> None:
        self.lacking = lacking
        monkeypatch.setattr(nccl, "load", functools.partial(self.load, nccl.load))

    def load(self, load: Any, module: Any) -> Any:
        if pycomm.rank() in self.lacking:
            raise errors.Unsupported("no NCCL anywhere")
        return load(module)

    def run(self, group: pycomm.Group, device: Any, body: Any, *args: Any) -> Any:
        """In a rank."""
        if not isinstance(nccl.load, functools.partial):  # a process, which ends with the test
            nccl.load = functools.partial(self.load, nccl.load)
        return body(group, device, *args)


class Signal:
    """A file with which one rank continues others, whether they are threads or processes."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "signal"

    def set(self) -> None:
        self._file.touch()

    def wait(self, limit_s: float) -> bool:
        """Whether it was set within the limit."""
        end = time.monotonic() + limit_s
        while not self._file.exists():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)  # files send no notification
        return True


EMULATED = ["emulated", "emulated, shared"]
KINDS = [*EMULATED, "cuda", "cuda, shared"]


def on(*kinds: str) -> pytest.MarkDecorator:
    """Restricts a test to machines of these kinds."""
    return pytest.mark.parametrize("machine", kinds, indirect=True)


@pytest.fixture(name="machine", params=KINDS, scope="module")
def machine_fixture(request: pytest.FixtureRequest) -> Any:
    with Machine(request.param) as found:
        yield found


def _call(group: pycomm.Group, device: Any, test: Test, given: dict[str, Any]) -> None:
    test.__wrapped__(group, device, **given)  # type: ignore[attr-defined]  # of functools.wraps


def on_devices(size: int, **options: Any) -> Callable[[Test], Test]:
    """A test whose body runs on `size` ranks of a machine, with its group and the rank's device;
    `options` are those of Machine.run(). on_ranks.py has the like without devices."""

    def decorate(program: Test) -> Test:
        @functools.wraps(program)
        def test(machine: Machine, **given: Any) -> None:
            machine.run(size, _call, test, given, **options)

        return with_parameters(test, ["machine", *list(inspect.signature(program).parameters)[2:]])

    return decorate


class EmulatedHere(ExitStack):
    """Groups created in this process use emulated devices."""

    def __enter__(self) -> EmulatedHere:
        module = programs.emulated()
        module.runtime.set_eager(False)
        module.set_order("forward", 1, 4)
        self.callback(module.runtime.set_eager, True)
        self.enter_context(device_groups.override_device_module(module))
        return self


def _rank(
    group: pycomm.Group, chosen: tuple[str, list[int], bool], fn: Any, args: tuple[Any, ...]
) -> Any:
    kind, indices, crowded = chosen
    alone = kind == "emulated" and device_groups._Source.module is None  # a separate process
    with EmulatedHere() if alone else ExitStack():
        if crowded:  # NCCL takes ranks with different host ids for ranks of different hosts
            os.environ["NCCL_HOSTID"] = f"pycomm-{group.rank}"
        device = DEVICES[kind](indices[group.rank])
        try:
            return fn(group, device, *args)
        finally:
            device.end()


def numbers(rank: int, shape: Any = (100,), dtype: str = "float32") -> Any:
    """Small integers that differ by rank: every order of summation gives the same sum."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 + rank * 31) % 101).astype(dtype).reshape(shape)


def summed_once(group: pycomm.Group, device: Any) -> Any:
    """numbers() of this rank on its device, after a first sum, which connects the ranks."""
    x = device.put(numbers(group.rank))
    pycomm.all_reduce(x)
    device.get(x)
    return x


def odd(rank: int, count: int, dtype: str) -> Any:
    """Numbers whose sum depends on the order of summation."""
    x = np.random.default_rng(rank).standard_normal(count) * 10
    return x.astype(dtype)
