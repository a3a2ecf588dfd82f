"""Torch tensors on emulated GPUs, for the tests of the backend and of DataParallel.

A process of a pool (torch_ranks.py) has one device, whose number is its rank. No test itself:
test_c10d_device*.py and test_parallel_devices.py import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch_ranks import Pools, Run

from pycomm import device_groups
from pycomm.kernels import devices

sys.path.insert(0, str(Path(__file__).parent / "emulator"))
import programs

POOLS = Pools()  # processes in which torch has a device more, and so not those of other tests
BACKEND = "cpu:pycomm,privateuseone:pycomm"


class TorchModule(ModuleType):
    """What torch asks of `torch.cuda`, for the devices that the tests add."""

    @staticmethod
    def _lazy_init() -> None: ...

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_stream(index: int) -> Stream:
        return Stream(index)


class Stream:
    """The thread's current stream of a device, with what pycomm asks of a `torch.cuda.Stream`."""

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
            torch.utils.rename_privateuse1_backend("privateuseone")  # says that it is there
            torch._register_device_module("privateuseone", TorchModule("torch.privateuseone"))
        self._gates: list[Any] = []
        self.index = dist.get_rank()
        self.device = torch.device("privateuseone", self.index)

    def stream(self, number: int) -> int:
        """Makes a stream of the device the thread's current one; the number of that before."""
        return int(self.module.use_stream(self.index, number))

    def delay(self) -> Callable[[], None]:
        """Lets the current stream wait until what this gives is called."""
        gate = self.runtime.Gate(self.module.stream(self.index))
        self._gates.append(gate)
        open_gate: Callable[[], None] = gate.open
        return open_gate

    def end(self) -> None:
        """Nothing waits any more: other tests use the same streams."""
        for gate in self._gates:
            gate.open()

    def counts(self) -> dict[str, int]:
        """What NCCL was given since the last call, and has begun."""
        return dict(programs.emulated().nccl.take_counts())


def on_emulated(fn: Callable[..., Any], *args: Any) -> Any:
    """In a process of the pool: `fn(device, *args)` where groups take emulated devices."""
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
    """The rank's tensors lie on device 0, as those of the other ranks."""
    at.index, at.device = 0, torch.device("privateuseone", 0)


def runner(folder: Path, before: Any) -> Run:
    """run(size, fn, *args) -> the results of `fn(device, *args)` by rank."""
    return lambda size, fn, *args: POOLS.of(size, before).run(
        folder, BACKEND, on_emulated, fn, *args
    )
