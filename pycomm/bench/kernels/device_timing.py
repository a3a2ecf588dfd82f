"""Devices of `bench kernels`: the timing of a call, and the loops that give the limit.

On the CPU a call is timed by the clock, after a pause for all threads. On a GPU it is timed by
events of its stream: a call that a graph can hold is captured once for each step and replayed.
Before each call a buffer of four times the L2 cache is read, so that the cache holds no data of
the call and no pending writes; the device does that while the host enqueues the timed call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pycomm import _core
from pycomm._core_api import arrays, devices
from pycomm.bench.kernels.comparison import Array, Call, Traffic
from pycomm.bench.support import machine
from pycomm.errors import Unsupported

STREAMS = {
    "step": Traffic(12, 8),
    "copy": Traffic(4, 4),
    "copy nontemporal": Traffic(4, 4),
    "torch's copy": Traffic(4, 4),
    "read": Traffic(4, 0),
    "fill": Traffic(0, 4),
}
"""Bytes that each loop moves for an element."""


class Spent(NamedTuple):
    """Seconds of one call: until it ended, and until it returned to the host."""

    seconds: float
    host_s: float


Timer = Callable[[int], Spent]


class Cpu:
    """Host memory, and all threads."""

    name = "cpu"
    device = torch.device("cpu")
    replays = False
    """Whether graphs are timed."""
    rest_s = 0.005
    """Pause between two calls: after an operation torch's threads poll for work, on the processors
    that the next contestant needs."""

    def describe(self) -> dict[str, Any]:
        """Settings to store beside the machine."""
        return {"device": self.name}

    def memory_shortage(self, nbytes: int) -> str:
        """ "": the caller checks host memory."""
        del nbytes
        return ""

    def timer(self, call: Call, *, waits: bool = False) -> Timer:
        """Times `call` at a step. `waits`: the call waits for the device."""
        del waits

        def timed(step: int) -> Spent:
            time.sleep(self.rest_s)  # until polling threads sleep
            begin = time.perf_counter()
            call(step)
            spent = time.perf_counter() - begin
            return Spent(spent, spent)

        return timed

    def result(self, call: Call, *, waits: bool = False) -> Any:
        """The result of the call at step 0, computed as it is timed."""
        del waits
        return call(0)

    def forget(self) -> None:
        """Frees the memory of the timers."""

    def streams(self, count: int) -> dict[str, Call]:
        """The loops, each with its own arrays, which leave the caches between two calls."""
        own = np.ones((8, count), np.float32)
        grad, u, v, *pairs, read = (int(row.ctypes.data) for row in own)

        def step(_: int, _own: Array = own) -> None:  # keeps the arrays
            _core.stream_step(grad, u, v, count)

        return {
            "step": step,
            "copy": lambda _: _core.stream_copy(pairs[0], pairs[1], count, False),
            "copy nontemporal": lambda _: _core.stream_copy(pairs[2], pairs[3], count, True),
            "read": lambda _: _core.stream_read(read, count),
            **self._of_torch(count),
        }

    def _of_torch(self, count: int) -> dict[str, Call]:
        filled, source, target = (torch.ones(count, device=self.device) for _ in range(3))
        return {
            "fill": lambda _: filled.zero_(),
            "torch's copy": lambda _: target.copy_(source),
        }


class Cuda(Cpu):
    """The current GPU. `cuda` is torch.cuda, or its replacement in a test."""

    name = "cuda"
    device = torch.device("cuda")
    replays = True

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._gpu = cuda.get_device_properties(cuda.current_device())
        words = self._gpu.L2_cache_size  # four times its bytes, in words of four
        self._flushed = torch.zeros(words, dtype=torch.float32, device=self.device)
        self._new_pool()

    def _new_pool(self) -> None:
        # torch frees a pool with its last graph and refuses to use it again, so one graph is kept.
        self._pool = self._cuda.graph_pool_handle()
        self._kept = self.captured(lambda _: self._flushed[:1].zero_(), 0)[1]

    def describe(self) -> dict[str, Any]:
        """Settings to store beside the machine."""
        return {
            "device": self.name,
            "gpu": self._gpu.name,
            "gpu_memory_mb": self._gpu.total_memory >> 20,
            "l2_bytes": self._gpu.L2_cache_size,
            "cuda": torch.version.cuda,
        }

    def memory_shortage(self, nbytes: int) -> str:
        """The reason why so many bytes do not fit, else ""."""
        free = self._cuda.mem_get_info()[0]
        need = f"{nbytes / 2**30:.1f} GiB are needed and {free / 2**30:.1f} are free"
        return need if nbytes > free else ""

    def timer(self, call: Call, *, waits: bool = False) -> Timer:
        """Times `call` at a step, by a graph unless it waits for the device."""
        steps: dict[int, Callable[[], Any]] = {}

        def timed(step: int) -> Spent:
            if step not in steps:
                steps[step] = partial(call, step) if waits else self.captured(call, step)[1]
            begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            self._cuda.synchronize()
            self._flushed.sum()
            begin.record()
            start = time.perf_counter()
            steps[step]()
            host_s = time.perf_counter() - start
            end.record()
            end.synchronize()
            return Spent(begin.elapsed_time(end) / 1e3, host_s)

        return timed

    def captured(self, call: Call, step: int) -> tuple[Any, Callable[[], Any]]:
        """The call's result, valid after a replay, and the replay. All graphs share memory, as
        never two of them run at once."""
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph, pool=self._pool):
            result = call(step)
        return result, graph.replay

    def result(self, call: Call, *, waits: bool = False) -> Any:
        """The result of the call at step 0, by a graph unless it waits for the device."""
        if waits:
            return call(0)
        result, replay = self.captured(call, 0)
        replay()
        self._cuda.synchronize()  # before the graph is destroyed
        return result

    def forget(self) -> None:
        """Gives back the memory of the graphs."""
        self._new_pool()
        self._cuda.empty_cache()

    def streams(self, count: int) -> dict[str, Call]:
        """The loops of csrc/cuda/bandwidth.cu beside torch's copy, each in arrays of its own."""
        grad, u, v, source, target, x = (torch.ones(count, device=self.device) for _ in range(6))
        most = torch.zeros(1, dtype=torch.int32, device=self.device)
        where = arrays.as_array_ref(grad, "grad").device
        loops = devices.module(where)

        def on(array: Tensor) -> tuple[int, int]:
            return devices.queue(where, array)  # a capture has another stream

        def address(*tensors: Tensor) -> list[int]:
            return [tensor.data_ptr() for tensor in tensors]

        return {
            "step": lambda _: loops.stream_step(*address(grad, u, v), count, *on(u)),
            "copy": lambda _: loops.stream_copy(*address(source, target), count, *on(target)),
            "read": lambda _: loops.stream_read(*address(x), count, *address(most), *on(x)),
            **self._of_torch(count),
        }


def first_gpu() -> Cuda:
    """The current GPU.

    Raises:
        Unsupported: there is none that pycomm and torch can use.
    """
    why = machine.gpus()[1]
    if why:
        raise Unsupported(why)
    return Cuda()


DEVICES: dict[str, Callable[[], Cpu]] = {"cpu": Cpu, "cuda": first_gpu}
