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

import torch

from pycomm.bench.kernels.comparison import Call, Traffic
from pycomm.bench.support import machine
from pycomm.errors import Unsupported

STREAMS = {
    "add": Traffic(8, 4),
    "copy": Traffic(4, 4),
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
        """Loops of torch, each with its own arrays, which leave the caches between two calls."""
        new = partial(torch.ones, count, device=self.device)
        source, target, term, total, read, filled = (new() for _ in range(6))
        found = torch.zeros((), device=self.device)
        return {
            "add": lambda _: torch.add(term, total, out=total),
            "copy": lambda _: target.copy_(source),
            "read": lambda _: torch.dot(read, read, out=found),
            "fill": lambda _: filled.zero_(),
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
