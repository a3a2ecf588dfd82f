"""The multi-rank parts of `python -m benchmarks gpu`: NCCL alone, two ranks that share a GPU,
layers that communicate, and training over pycomm and torch's DDP over nccl.

    python -m benchmarks.gpu.gpu_ranks {alone,shared,layers,training} [options]

Exits with 0 if all is as expected. The caller must end a hang.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from pycomm.bench.support import processes
from pycomm.bench.support.processes import Rank

# NCCL refuses two ranks on one GPU, with two exceptions: 2.30.3 and newer have an option for it
# (experimental), and ranks that appear to be on different hosts communicate through sockets.
WAYS = {
    "multi-rank": lambda rank: {"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    "host-id": lambda rank: {"NCCL_HOSTID": f"pycomm-{rank}", "NCCL_P2P_DISABLE": "1"},
}
STEPS = 20
TRAINED = {
    "nccl": "torch's DDP over nccl",
    "pycomm": "torch's DDP over pycomm",
    "DataParallel": "pycomm's own wrapper",
    "DGC": "the same, with 1 % of each gradient",
    "Quantize": "the same, with gradients at 3 bits",
    "TopK": "LocalSGD, with a tenth of the updates",
}
COMPRESSED = ("DGC", "Quantize", "TopK")
"""Ways to train. Without a GPU there is also the backend gloo."""


def main(argv: Sequence[str]) -> int:
    """Runs one of the programs; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.gpu_ranks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=("alone", "shared", "layers", "training"))
    parser.add_argument("--way", choices=tuple(WAYS), help="how NCCL lets ranks share a GPU")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args(argv)
    if options.what == "alone":
        return alone()
    if options.what == "shared":
        return shared(options.way or "multi-rank")
    if options.what == "layers":
        return layers(options.ranks, options.way)
    return training(options.ranks, options.way)


def alone() -> int:
    """Prints the loaded NCCL, and makes a communicator."""
    from pycomm._core_api import nccl

    library = nccl.load()
    print(f"NCCL {library.version} from {library.origin}")
    library.try_communicator()
    print("a communicator of one rank was made and ended")
    return 0


def shared(way: str) -> int:
    """Sums on two ranks whose GPU is the first one."""
    right: dict[int, bool] = {}
    processes.run(_share, (way,), 2, right.__setitem__)
    print(f"two ranks on one GPU, {way}: {'right' if all(right.values()) else 'wrong'}: {right}")
    return 0 if len(right) == 2 and all(right.values()) else 1


def _share(rank: Rank, way: str) -> None:
    os.environ.update(WAYS[way](rank.rank))
    dist.init_process_group("pycomm", store=rank.store, rank=rank.rank, world_size=rank.size)
    fine = True
    for count in (1, 1000, 1 << 20):
        x = torch.full((count,), float(rank.rank + 1), device="cuda:0")
        dist.all_reduce(x)
        fine = fine and bool((x == 3).all().item())
    rank.send(fine)


def layers(ranks: int, way: str | None = None) -> int:
    """Compares what layers that communicate return on GPUs and in host memory, with gradients."""
    worst: dict[int, float] = {}
    processes.run(_compare_layers, (way,), ranks, worst.__setitem__)
    largest = max(worst.values())
    print(f"SyncBatchNorm, functional and ScatterLoader on {ranks} ranks:")
    print(f"largest difference to host memory, relative to the largest element: {largest:.1e}")
    return 0 if len(worst) == ranks and largest < 1e-5 else 1


def _compare_layers(rank: Rank, way: str | None) -> None:
    device = join(rank, "pycomm", "cuda", way)
    pycomm.init()  # torch's default group
    here, there = (layer_results(place, rank.rank) for place in (torch.device("cpu"), device))
    differences = [
        ((one - other).abs().max() / one.abs().max().clamp(min=1)).item()
        for one, other in zip(here, there, strict=True)
        if one.numel()
    ]
    batches = [torch.arange(rows * 4.0, device=device).view(rows, 4) for rows in (6, 5, 1)]
    loader = pycomm.data.ScatterLoader(batches if rank.rank == 0 else None, device=device)
    for whole, rows in zip(batches, loader, strict=True):
        own = torch.tensor_split(whole, rank.size)[rank.rank]
        if rows.device != device or not torch.equal(rows, own):
            raise AssertionError(f"ScatterLoader: got {rows}, expected {own}")
    rank.send(max(differences))


def layer_results(device: torch.device | str, rank: int) -> list[torch.Tensor]:
    """Results and gradients of a normalization, with an empty batch too, and of a loss over all
    ranks' outputs. Collective over the default group."""
    found: list[torch.Tensor] = []
    layer = pycomm.SyncBatchNorm(4).to(device)
    made = torch.Generator().manual_seed(rank)
    for count in (3 + rank, 5 * rank):
        x = torch.randn(count, 4, 3, generator=made).to(device).requires_grad_()
        y = layer(x)
        loss = y.square().mul(torch.arange(4.0).view(4, 1).to(device)).sum()
        torch.autograd.backward(loss)
        found += [y, _gradient(x), *(b.clone() for b in layer.buffers())]
        found += [_gradient(p).clone() for p in (layer.weight, layer.bias)]
    x = torch.randn(2, 3, generator=made).to(device).requires_grad_()
    rows = pycomm.functional.all_gather(x.t())
    total = pycomm.functional.all_reduce(x.square(), "mean")
    torch.autograd.backward(rows.square().sum() * (rank + 1) + (total**3).sum())
    return [y.detach().cpu() for y in (*found, rows, total, _gradient(x))]


def _gradient(x: torch.Tensor) -> torch.Tensor:
    if x.grad is None:
        raise AssertionError("the backward pass gave no gradient")
    return x.grad


def training(ranks: int, way: str | None = None) -> int:
    """Compares the losses of every way to train with those of nccl, within rounding. All ranks
    share the first GPU if `way` is given."""
    losses: dict[str, list[float]] = {}
    for trained, title in TRAINED.items():
        by_rank: dict[int, list[float]] = {}
        processes.run(train, (trained, "cuda", way), ranks, by_rank.__setitem__)
        losses[trained] = by_rank[0]
        print(f"{title}: {' '.join(f'{loss:.6f}' for loss in by_rank[0])}", flush=True)
    return judge(losses)


def judge(losses: Mapping[str, Sequence[float]]) -> int:
    """0 if all losses fall and match the first; those with compression may lag behind."""
    first = next(iter(losses))
    fine = True
    for way, ours in losses.items():
        if len(ours) != len(losses[first]) or not ours[-1] < ours[0]:
            print(f"{way}: the losses do not fall, or are not as many")
            fine = False
        elif way not in (first, *COMPRESSED):
            worst = max(abs(a - b) / abs(b) for a, b in zip(ours, losses[first], strict=True))
            print(f"{way}: largest difference of a loss to {first}: {worst:.1e}")
            fine = fine and worst < 1e-3
    return 0 if fine else 1


def train(rank: Rank, way: str, kind: str, shares: str | None = None) -> None:
    """STEPS steps of a small model; sends the losses, each the mean over ranks."""
    device = join(rank, way if way in ("nccl", "gloo") else "pycomm", kind, shares)
    torch.manual_seed(0)
    parts = (torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 10))
    net = torch.nn.Sequential(*parts).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model, stepped = _wrapped(net, optimizer, way)
    made = torch.Generator().manual_seed(rank.rank)
    x = torch.randn(64, 256, generator=made).to(device)
    target = torch.randint(0, 10, (64,), generator=made).to(device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), target)
        torch.autograd.backward(loss)
        stepped.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / rank.size)
    rank.send(losses)


def join(
    rank: Rank, backend: str, kind: str, shares: str | None, options: Any = None
) -> torch.device:
    """Creates torch's default group, with these options of pycomm's; returns the device of this
    rank, the first GPU if `shares` names a way to share it."""
    if shares:
        os.environ.update(WAYS[shares](rank.rank))
    index = 0 if shares else rank.rank
    device = torch.device(kind, index) if kind != "cpu" else torch.device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bound: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        backend,
        store=rank.store,
        rank=rank.rank,
        world_size=rank.size,
        pg_options=options,
        **bound,
    )
    return device


def _wrapped(
    net: torch.nn.Module, optimizer: torch.optim.SGD, way: str
) -> tuple[torch.nn.Module, Any]:
    """The model whose gradients are averaged, in small buckets, and what steps it."""
    if way not in ("DataParallel", *COMPRESSED):
        device = next(net.parameters()).device
        ids = [device.index] if device.type == "cuda" else None
        ddp = torch.nn.parallel.DistributedDataParallel(net, device_ids=ids, bucket_cap_mb=0.1)
        return ddp, optimizer
    pycomm.init()  # torch's default group
    if way == "TopK":
        topk = pycomm.TopK(density=0.1)
        return net, pycomm.LocalSGD(net, optimizer, compression=topk)
    compression: pycomm.DGC | pycomm.Quantize | None = None
    if way == "DGC":
        compression = pycomm.DGC(optimizer, sparsity=[0.99], min_count=0)
    elif way == "Quantize":
        compression = pycomm.Quantize()
    return pycomm.DataParallel(net, compression=compression, bucket_mb=0.1), optimizer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
