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
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import Pools, Run, values

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

    class ExternalStream:
        """A stream that torch did not make."""

        def __init__(self, address: int, device: Any) -> None:
            self.stream_id = address


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
    with (
        device_groups.override_device_module(module, "privateuseone"),
        devices.override_kernels("cuda", module.kernels),
    ):
        return on_device(fn, *args)


def on_device(fn: Callable[..., Any], *args: Any) -> Any:
    """The same with devices that torch has and pycomm lacks."""
    module = programs.emulated()
    module.runtime.set_eager(False)
    module.set_order("forward", 1, 4)
    at = Emulated()
    try:
        return fn(at, *args)
    finally:
        at.end()


def check_verbs(at: Any) -> None:
    """Calls every verb with tensors on the rank's device, and compares."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = [values(r, (6, 5), torch.float32) for r in range(size)]

    def here(x: torch.Tensor) -> torch.Tensor:
        return x.to(at.device)

    x = here(whole[rank])
    dist.all_reduce(x)
    assert torch.equal(x.cpu(), sum(whole))
    view = here(whole[rank])[:, 1]  # not contiguous
    dist.all_reduce(view, async_op=True).wait()
    assert torch.equal(view.cpu(), sum(w[:, 1] for w in whole))
    y = here(whole[rank])
    dist.broadcast(y, size - 1)
    assert torch.equal(y.cpu(), whole[-1])
    out = torch.empty(size * 6, 5, device=at.device)
    dist.all_gather_into_tensor(out, here(whole[rank]))
    assert torch.equal(out.cpu(), torch.cat(whole))
    parts = [torch.empty(6, 5, device=at.device) for _ in range(size)]
    dist.all_gather(parts, here(whole[rank]), async_op=True).wait()
    assert all(torch.equal(p.cpu(), w) for p, w in zip(parts, whole, strict=True))
    part = torch.empty(2, 5, device=at.device)
    dist.reduce_scatter_tensor(part, here(whole[rank][: 2 * size]))
    assert torch.equal(part.cpu(), sum(w[2 * rank : 2 * rank + 2] for w in whole))
    got = torch.empty(6, 5, device=at.device)
    dist.all_to_all_single(got, here(whole[rank]))
    each = 6 // size
    assert torch.equal(got.cpu(), torch.cat([w[rank * each : (rank + 1) * each] for w in whole]))
    lists = [list(here(w).split(6 // size)) for w in whole]  # by source
    got = [torch.empty_like(part) for part in lists[0]]
    dist.all_to_all(got, lists[rank])
    assert all(torch.equal(g.cpu(), of[rank].cpu()) for g, of in zip(got, lists, strict=True))
    dist.reduce_scatter(got[0], lists[rank])
    assert torch.equal(got[0].cpu(), sum(of[rank].cpu() for of in lists))
    dist.scatter(got[0], lists[1] if rank == 1 else None, 1)
    assert torch.equal(got[0].cpu(), lists[1][rank].cpu())
    dist.gather(y, parts if rank == 0 else None, 0)
    assert rank or all(torch.equal(p.cpu(), whole[-1]) for p in parts)
    z = here(whole[rank])
    dist.reduce(z, 0, dist.ReduceOp.MAX)
    if rank == 0:
        assert torch.equal(z.cpu(), torch.stack(whole).amax(0))
    cpu = whole[rank].clone()  # the same group, in host memory
    dist.all_reduce(cpu)
    assert torch.equal(cpu, sum(whole))
    dist.barrier()


def train(device: Any) -> list[torch.Tensor]:
    """Steps of DDP on the device; returns the parameters."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        x = torch.randn(8, 20, generator=data).to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def share_a_device(at: Any) -> None:
    """Places the rank's tensors on device 0, like those of the other ranks."""
    at.index, at.device = 0, torch.device("privateuseone", 0)


@pytest.fixture(name="run")
def run_fixture(tmp_path: Path, no_leaks: Any) -> Run:
    """run(size, fn, *args) -> the results of `fn(device, *args)` by rank."""
    return lambda size, fn, *args: POOLS.of(size, no_leaks).run(
        tmp_path, BACKEND, on_emulated, fn, *args
    )


def check_coalesced(at: Any) -> None:
    """A coalesced list of all_reduce calls has the sums."""
    xs = [torch.full((n,), float(n), device=at.device) for n in (3, 1000)]
    with dist._coalescing_manager(device=at.device, async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    for n, x in zip((3, 1000), xs, strict=True):
        assert (x.cpu() == n * dist.get_world_size()).all()
