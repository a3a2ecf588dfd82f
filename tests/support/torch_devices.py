"""Torch tensors on emulated GPUs, for the tests of the backend and of DataParallel.

A process of a pool (torch_ranks.py) has one device, whose number is its rank. test_c10d_device*.py
and test_parallel_devices.py import the fixture and the marks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import programs
import pytest
import torch
import torch.distributed as dist
from torch_ranks import Pools, Run

from pycomm._core_api import device_groups, devices

# Separate from other tests, since torch has an additional device in these processes.
POOLS = Pools()
BACKEND = "cpu:pycomm,privateuseone:pycomm"
MARKS = [
    pytest.mark.skipif(programs.nvcc() is None, reason="needs nvcc, for the headers of CUDA"),
    pytest.mark.timeout(400),
]


class TorchModule(ModuleType):
    """The functions of `torch.cuda` that torch uses, for the devices of the tests."""

    @staticmethod
    def _lazy_init() -> None: ...

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_stream(index: int) -> Stream:
        return Stream(index)


class Stream:
    """The thread's current stream of a device, with the part of `torch.cuda.Stream` that pycomm
    uses."""

    def __init__(self, index: int) -> None:
        self.cuda_stream = programs.emulated_torch().stream(index)
        self.torchs = torch.accelerator.current_stream(index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.cuda_stream == other.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def wait_stream(self, other: Stream) -> None:
        self.torchs.wait_stream(other.torchs)


class Emulated:
    """The emulated device of this process, as torch sees it."""

    def __init__(self) -> None:
        self.module = programs.emulated_torch()
        self.runtime = programs.emulated().runtime
        if not hasattr(torch, "privateuseone"):
            torch.utils.rename_privateuse1_backend("privateuseone")  # registers the device
            torch._register_device_module("privateuseone", TorchModule("torch.privateuseone"))
        self._gates: list[Any] = []
        self.index = dist.get_rank()
        self.device = torch.device("privateuseone", self.index)

    def stream(self, number: int) -> int:
        """Makes a stream of the device the thread's current one; returns the number of the previous
        one."""
        return int(self.module.use_stream(self.index, number))

    def delay(self) -> Callable[[], None]:
        """Blocks the current stream until the returned function is called."""
        gate = self.runtime.Gate(self.module.stream(self.index))
        self._gates.append(gate)
        return gate.open

    def end(self) -> None:
        """Removes all blocks: other tests use the same streams."""
        for gate in self._gates:
            gate.open()

    def counts(self) -> dict[str, int]:
        """The operations that NCCL received since the last call and started."""
        return dict(programs.emulated().nccl.take_counts())


def on_emulated(fn: Callable[..., Any], *args: Any) -> Any:
    """In a process of the pool: `fn(device, *args)` with emulated devices for groups."""
    module = programs.emulated()
    module.runtime.set_eager(False)
    module.set_order("forward", 1, 4)
    with (
        device_groups.override_device_module(module, "privateuseone"),
        devices.override_kernels("cuda", module.kernels),
    ):
        at = Emulated()
        try:
            return fn(at, *args)
        finally:
            at.end()


def share_a_device(at: Any) -> None:
    """Places the rank's tensors on device 0, like those of the other ranks."""
    at.index, at.device = 0, torch.device("privateuseone", 0)


@pytest.fixture(name="run")
def run_fixture(tmp_path: Path, no_leaks: Any) -> Run:
    """run(size, fn, *args) -> the results of `fn(device, *args)` by rank."""
    return lambda size, fn, *args: POOLS.of(size, no_leaks).run(
        tmp_path, BACKEND, on_emulated, fn, *args
    )
