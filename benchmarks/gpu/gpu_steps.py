"""The measuring parts of `python -m benchmarks gpu`: the host's time of a call, steps of training
with the parameters of ResNet-50, and memory of groups; over nccl and over pycomm.

    python -m benchmarks.gpu.gpu_steps {calls,steps,memory} [--ranks N] [--way WAY]

Each result is a line of JSON. The caller must end a hang.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from benchmarks.gpu.gpu_ranks import WAYS, join
from benchmarks.training.models import resnet50_shapes
from pycomm.bench.support import processes
from pycomm.bench.support.processes import Rank

CALLS = 100  # in a block; the median of BLOCKS counts
BLOCKS = 7
BYTES = (0, 4096, 1 << 20)
BACKENDS = ("nccl", "before", "after")
"""pycomm's two ways to compare calls, beside nccl; without a GPU there is gloo in place of it."""
STEPS = 30
TRAINED = ("nccl", "pycomm", "DGC, raw", "DGC, coded", "Quantize", "DGC, scaler")
RUNTIME = {  # of a step, in torch.profiler
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "copies": ("cudaMemcpyAsync", "cudaMemcpy"),
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
}
GROUPS = (1, 2, 4)
CAPTURES = 5


def main(argv: Sequence[str]) -> int:
    """Runs one of the programs; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.gpu_steps", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=("calls", "steps", "memory"))
    parser.add_argument("--way", choices=tuple(WAYS), help="how NCCL lets ranks share a GPU")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(argv)
    if options.what == "memory":
        measure(memory, ("cuda", options.way), options.ranks)
    body, names = (time_calls, BACKENDS) if options.what == "calls" else (time_steps, TRAINED)
    for name in names if options.what != "memory" else ():
        measure(body, (name, "cuda", options.way), options.ranks)
    return 0


def measure(body: Callable[..., None], args: tuple[Any, ...], ranks: int) -> list[dict[str, Any]]:
    """Prints and returns what rank 0 sends."""
    found: list[dict[str, Any]] = []

    def receive(rank: int, row: dict[str, Any]) -> None:
        if rank == 0:
            found.append(row)
            print(json.dumps(row), flush=True)

    processes.run(body, args, ranks, receive)
    return found


def synchronize(device: torch.device) -> None:
    """Waits for the device; nothing in host memory."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(rank: Rank, name: str, kind: str, shares: str | None = None) -> None:
    """The microseconds until all_reduce returns, and until its result is there, by size."""
    options = None
    if name in ("before", "after"):
        options = pycomm.torch_backend.Options(cuda_agreement=name)
    backend = "pycomm" if options else name
    device = join(rank, backend, kind, shares, options)
    for nbytes in BYTES:
        x = torch.zeros(nbytes // 4, device=device)
        host, complete = [], []
        for _ in range(BLOCKS + 1):  # the first one is not measured
            synchronize(device)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                dist.all_reduce(x)
            returned = time.perf_counter()
            synchronize(device)
            host.append((returned - start) / CALLS * 1e6)
            complete.append((time.perf_counter() - start) / CALLS * 1e6)
        row = {"calls": name, "bytes": nbytes, "host_us": statistics.median(host[1:])}
        rank.send({**row, "complete_us": statistics.median(complete[1:])})


class Products(nn.Module):
    """A sum of products of parameters and numbers: a step is its exchange and its optimizer."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum."""
        terms = [(x * w).sum() for x, w in zip(numbers, self.factors, strict=True)]
        return torch.stack(terms).sum()


def compressed(net: nn.Module, optimizer: Any, name: str, scaler: Any) -> nn.Module:
    """The model whose gradients are averaged by this way of TRAINED."""
    if name.startswith("DGC"):
        pycomm.init()  # torch's default group
        coded: dict[str, Any] = {"value_dtype": "2bit"} if name == "DGC, coded" else {}
        dgc = pycomm.DGC(optimizer, sparsity=[0.999], exchange="gather", scaler=scaler, **coded)
        return pycomm.DataParallel(net, compression=dgc)
    if name == "Quantize":
        pycomm.init()
        return pycomm.DataParallel(net, compression=pycomm.Quantize(exchange="sharded"))
    return nn.parallel.DistributedDataParallel(net)


def time_steps(
    rank: Rank,
    name: str,
    kind: str,
    shares: str | None = None,
    shapes: Sequence[tuple[int, ...]] = (),
) -> None:
    """Milliseconds of a step: median and largest; and what one more does in CUDA's runtime."""
    device = join(rank, name if name in ("nccl", "gloo") else "pycomm", kind, shares)
    torch.manual_seed(0)
    net = Products(shapes or resnet50_shapes()).to(device)
    numbers = [torch.randn_like(w) for w in net.factors]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type) if name.endswith("scaler") else None
    model = compressed(net, optimizer, name, scaler)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(numbers)
        if scaler is None:
            torch.autograd.backward(loss)
            optimizer.step()
        else:
            torch.autograd.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()

    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    row = {"steps": name, "ms": statistics.median(times[5:]), "worst_ms": max(times[5:])}
    rank.send({**row, **runtime_calls(step)})


def runtime_calls(step: Callable[[], None]) -> dict[str, int]:
    """How often a step makes each kind of call of RUNTIME."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
    counts = {event.key: event.count for event in profile.key_averages()}
    return {kind: sum(counts.get(name, 0) for name in names) for kind, names in RUNTIME.items()}


def memory(rank: Rank, kind: str, shares: str | None = None) -> None:
    """MiB of the device that each number of groups takes, and each capture of a call and formation
    of a group again."""
    device = join(rank, "pycomm", kind, shares)

    def used_mib() -> float:
        synchronize(device)
        dist.barrier()
        if device.type != "cuda":
            return 0.0
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 2**20

    x = torch.ones(1 << 18, device=device)
    before = used_mib()
    groups = [dist.group.WORLD]
    for count in GROUPS:
        while len(groups) < count:
            groups.append(dist.new_group(backend="pycomm"))
        for group in groups:
            dist.all_reduce(x, group=group)
        rank.send({"memory": "groups", "count": count, "mib": used_mib() - before})
    for count in range(1, CAPTURES + 1):
        group = dist.new_group(backend="pycomm")
        dist.all_reduce(x, group=group)
        if device.type == "cuda":
            synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                dist.all_reduce(x, group=group)
            graph.replay()
            synchronize(device)
            del graph
        dist.destroy_process_group(group)
        rank.send({"memory": "captures", "count": count, "mib": used_mib() - before})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
