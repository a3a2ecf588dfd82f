"""The program of each rank of the demo: trains the rows in turn and reports their outcomes."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pycomm.bench.support import text
from pycomm.bench.support.model import CharGPT, Shape
from pycomm.bench.support.processes import Rank
from pycomm.demo.rows import CLIP_NORM, ROWS, Row
from pycomm.demo.traffic import bytes_written, tcp_sockets

ROUNDS = 25  # turns of each row


@dataclass(frozen=True)
class Settings:
    """Settings of all rows; on 2 cores 6 rows take less than 4 minutes."""

    steps: int
    seed: int = 0
    batch: int = 8  # windows per rank and step
    warmup: int = 20  # steps
    link_rate: str = ""  # of a simulated host per rank, such as "1gbit"; "": ranks on this host

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to a twentieth of the peak, which is 1."""
        rising = min(1.0, (step + 1) / self.warmup)
        return rising * (0.525 + 0.475 * math.cos(math.pi * step / self.steps))


@dataclass(frozen=True)
class Outcome:
    """Message of every rank at the end, for each row."""

    key: str
    losses: list[float]  # of its own batches, by step
    seconds: list[float]  # by step
    sent: list[int]  # bytes by this rank so far, by step
    counted_by: str  # "pycomm" or "kernel"
    digest: str  # SHA-256 of all parameters
    final_loss: float  # on held-out text, the same on every rank
    sample: str  # written by the trained model; "" except of the last row, on rank 0
    parameters: int


def train(rank: Rank, keys: Sequence[str], settings: Settings) -> None:
    """Trains the rows `keys` in turn, some steps of each, so that other programs delay all alike.

    Rank 0 sends (key, step, loss of its batch) after each step of a row, then each rank one Outcome
    for each row.
    """
    dist.init_process_group("pycomm", store=rank.store, rank=rank.rank, world_size=rank.size)
    texts = text.load()
    model = CharGPT(Shape(alphabet=len(text.ALPHABET)))  # the first step of a process is slower
    _loss(model, model, texts[0], settings.batch, torch.Generator()).backward()  # type: ignore[no-untyped-call]  # torch's own
    writer = keys[-1] if rank.rank == 0 else ""
    rows = [_turns(rank, ROWS[key], settings, texts, key == writer) for key in keys]
    for row in rows:
        next(row)
    for _ in range(0, settings.steps, max(1, settings.steps // ROUNDS)):
        for row in rows:
            dist.barrier()  # the time of a row contains no wait for another row
            next(row)
    for row in rows:
        next(row, None)
    dist.barrier()  # no rank exits while another still needs it


def _turns(
    rank: Rank, row: Row, settings: Settings, texts: tuple[Tensor, Tensor], writes: bool
) -> Iterator[None]:
    """One row on this rank: makes its model, trains it turn by turn, and sends the outcome, in
    which the model writes text if `writes`."""
    torch.manual_seed(settings.seed)
    model = CharGPT(Shape(alphabet=len(text.ALPHABET)))
    optimizer = row.optimizer(model.parameters())
    random = torch.Generator().manual_seed(settings.seed * 1000 + rank.rank)
    others = tcp_sockets()
    own = None if row.backend == "pycomm" else dist.new_group(backend=row.backend)
    sockets = tcp_sockets() - others if own else None
    parallel = row.wrap(model, optimizer, own)
    dist.barrier()  # all ranks have received the parameters
    losses: list[float] = []
    seconds: list[float] = []
    sent: list[int] = []
    for step in range(settings.steps):
        if step % max(1, settings.steps // ROUNDS) == 0:
            yield
            last = bytes_written(sockets)  # which the rows of one group share
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = row.rate * settings.rate(step)
        loss = _loss(model, parallel.forward, texts[0], settings.batch, random)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        if not parallel.clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        parallel.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        now = bytes_written(sockets)
        sent.append(now - last + (sent[-1] if sent else 0))
        last = now
        if rank.rank == 0:
            rank.send((row.key, step + 1, losses[-1]))
    yield
    parallel.end()
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().numpy().tobytes())
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        final_loss = _loss(model, model, texts[1], 256, random).item()
    sample = ""
    if writes:
        random.manual_seed(0)
        sample = text.decode(model.write(text.encode(b"\ndef ").long(), 400, random)).strip("\n")
    count = sum(p.numel() for p in model.parameters())
    by = "kernel" if own else "pycomm"
    found = losses, seconds, sent, by, digest.hexdigest(), final_loss, sample, count
    rank.send(Outcome(row.key, *found))


def _loss(
    model: CharGPT, forward: nn.Module, tokens: Tensor, rows: int, random: torch.Generator
) -> Tensor:
    """The loss of a batch of `rows` windows."""
    x, y = text.batch(tokens, rows, model.shape.context, random)
    return F.cross_entropy(forward(x).flatten(0, 1), y.flatten())
