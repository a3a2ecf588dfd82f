"""The program of each rank of the demo: builds the model, trains it, reports the outcome."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pycomm.bench.support import text
from pycomm.bench.support.model import CharGPT, Shape
from pycomm.bench.support.processes import Rank
from pycomm.demo.rows import ROWS
from pycomm.demo.traffic import bytes_sent


@dataclass(frozen=True)
class Settings:
    """Settings of all rows; on 2 cores 6 rows take less than 4 minutes."""

    steps: int
    seed: int = 0
    batch: int = 8  # windows per rank and step
    warmup: int = 20  # steps
    link_rate: str = (
        ""  # of one simulated host per rank, such as "1gbit"; "": all ranks on this host
    )


@dataclass(frozen=True)
class Progress:
    """Message of rank 0 after each step; the loss is of its own batch."""

    step: int
    loss: float


@dataclass(frozen=True)
class Outcome:
    """Message of every rank at its end."""

    losses: list[float]  # of its own batches, by step
    seconds: list[float]  # by step
    sent: list[int]  # bytes by this rank so far, by step
    counted_by: str  # "pycomm", "kernel", or "computed" without a counter
    digest: str  # SHA-256 of all parameters
    final_loss: float  # on held-out text, the same on every rank
    sample: str  # written by the trained model; "" except on rank 0
    parameters: int


def train(rank: Rank, key: str, settings: Settings) -> None:
    """Trains row `key`; sends Progress messages and one Outcome."""
    row = ROWS[key]
    dist.init_process_group(row.backend, store=rank.store, rank=rank.rank, world_size=rank.size)
    torch.manual_seed(settings.seed)
    model = CharGPT(Shape(alphabet=len(text.ALPHABET)))
    optimizer = row.optimizer(model.parameters())
    parallel = row.wrap(model, optimizer)
    training_text, held_out = text.load()
    random = torch.Generator().manual_seed(settings.seed * 1000 + rank.rank)

    losses: list[float] = []
    seconds: list[float] = []
    sent: list[int] = []
    dist.barrier()
    before = bytes_sent(row.backend)
    for step in range(settings.steps):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = row.rate * _schedule(settings, step)
        x, y = text.batch(training_text, settings.batch, model.shape.context, random)
        loss = F.cross_entropy(parallel.forward(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        parallel.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        bytes_, counted_by = _difference(before, bytes_sent(row.backend))
        sent.append(bytes_ if before else (step + 1) * _ring_bytes(model, rank.size))
        if rank.rank == 0:
            rank.send(Progress(step + 1, losses[-1]))
    parallel.end()
    rank.send(
        Outcome(
            losses,
            seconds,
            sent,
            counted_by,
            _digest(model),
            _evaluate(model, held_out),
            _sample(model) if rank.rank == 0 else "",
            sum(p.numel() for p in model.parameters()),
        )
    )
    dist.barrier()  # no rank exits while another still needs it


def _schedule(settings: Settings, step: int) -> float:
    """Linear warm-up, then half a cosine down to a twentieth of the peak."""
    rising = min(1.0, (step + 1) / settings.warmup)
    cosine = math.cos(math.pi * step / settings.steps)
    return rising * (0.525 + 0.475 * cosine)


def _difference(before: tuple[int, str] | None, after: tuple[int, str] | None) -> tuple[int, str]:
    return (after[0] - before[0], after[1]) if before and after else (0, "computed")


def _ring_bytes(model: nn.Module, size: int) -> int:
    """Bytes that a rank sends in a ring all-reduce: 2 (size - 1) / size of all gradients."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return 2 * (size - 1) * total // size


def _digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for weight in model.parameters():
        sha.update(weight.detach().numpy().tobytes())
    return sha.hexdigest()


@torch.no_grad()
def _evaluate(model: CharGPT, tokens: torch.Tensor) -> float:
    random = torch.Generator().manual_seed(0)
    x, y = text.batch(tokens, 256, model.shape.context, random)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()


def _sample(model: CharGPT) -> str:
    start = text.encode(b"\ndef ").long()
    random = torch.Generator().manual_seed(0)
    return text.decode(model.write(start, 400, random)).strip("\n")
