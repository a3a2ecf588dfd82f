"""The GPU of a rank, for group_devices.py, and what CUDA keeps once a process has used it."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

PINNED = 8 << 20  # bytes of a rank's pinned memory
ALIGNED = 256
DELAY_S = 20.0  # of a delay that the test does not end
WAIT_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


def start_cuda() -> None:
    """Creates the context of each GPU and runs a kernel and copies there. CUDA keeps descriptors of
    these until the process ends, which the leak check would otherwise find after some test."""
    import torch

    for index in range(torch.cuda.device_count()):
        with torch.cuda.stream(torch.cuda.Stream(index)):
            there = torch.ones(1024, pin_memory=True).to(f"cuda:{index}", non_blocking=True)
            (there + 1).cpu()
        torch.cuda.synchronize(index)


class Cuda:
    """The GPU of a rank."""

    name = "cuda"

    def __init__(self, index: int) -> None:
        import torch

        self.index, self.torch = index, torch
        torch.cuda.set_device(index)
        self.stream = torch.cuda.Stream(index)
        torch.cuda.set_stream(self.stream)
        # Allocated now: an allocation may wait for a delayed stream.
        self._pinned = torch.empty(PINNED, dtype=torch.uint8, pin_memory=True)
        self._used = 0
        self._gates: list[Gate] = []

    def put(self, x: Any) -> Any:
        here = self._in_pinned_memory(x)
        return here.to(f"cuda:{self.index}", non_blocking=True)

    def write(self, there: Any, x: Any) -> None:
        there.copy_(self._in_pinned_memory(x), non_blocking=True)

    def _in_pinned_memory(self, x: Any) -> Any:
        """A copy of x. A copy from other memory would wait for the stream."""
        given = self.torch.from_numpy(np.array(x))
        if given.nbytes > PINNED or not given.nbytes:
            return given
        if given.nbytes > PINNED - self._used:
            self.stream.synchronize()  # earlier copies are done
            self._used = 0
        place = self._pinned[self._used : self._used + given.nbytes]
        self._used += -(-given.nbytes // ALIGNED) * ALIGNED
        return place.view(given.dtype).view(given.shape).copy_(given)

    def empty(self, shape: Any, dtype: Any) -> Any:
        made = self.torch.from_numpy(np.empty(shape, dtype))
        return self.torch.empty_like(made, device=f"cuda:{self.index}")

    def get(self, x: Any) -> np.ndarray:
        return np.asarray(x.cpu())

    def delay(self) -> Any:
        """Blocks the stream until the returned function is called, or for DELAY_S: a call that
        waits for the device must fail the test instead of stopping it."""
        self._gates.append(Gate(self.torch, self.stream))
        return self._gates[-1].open

    def end(self) -> None:
        for gate in self._gates:
            gate.open()

    def capture(self) -> None:
        self._graph = self.torch.cuda.CUDAGraph()
        self._graph.capture_begin(capture_error_mode="thread_local")

    def end_capture(self) -> Any:
        self._graph.capture_end()
        return self._graph.replay

    def idle(self) -> bool:
        return bool(self.stream.query())


class Gate:
    """Blocks a stream from now until open()."""

    def __init__(self, torch: Any, stream: Any) -> None:
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        result = wait(stream.cuda_stream, self._flag.data_ptr(), 1, WAIT_EQUAL)
        assert result == 0, f"cuStreamWaitValue32: error {result}"
        self._timer = threading.Timer(DELAY_S, self._flag.fill_, (1,))
        self._timer.daemon = True
        self._timer.start()

    def open(self) -> None:
        self._timer.cancel()
        self._flag.fill_(1)
