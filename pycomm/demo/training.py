"""The program of each rank of the demo: trains the rows in turn and reports their outcomes."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pycomm.bench.support import text
from pycomm.bench.support.model import CharGPT, Shape
from pycomm.bench.support.processes import Rank
from pycomm.demo.rows import ROWS, Row
from pycomm.demo.traffic import Counter, tcp_sockets

ROUNDS = 25  # turns of each row


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
    """Message of rank 0 after each step of a row; the loss is of its own batch."""

    key: str
    step: int
    loss: float


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

    Sends Progress messages, then one Outcome for each row.
    """
    dist.init_process_group("pycomm", store=rank.store, rank=rank.rank, world_size=rank.size)
    texts = text.load()
    _warm_up(settings, texts[0])
    rows = [_Training(rank, ROWS[key], settings, texts) for key in keys]
    turn = max(1, settings.steps // ROUNDS)
    for begin in range(0, settings.steps, turn):
        for row in rows:
            dist.barrier()  # the time of a row contains no wait for another row
            row.run(begin, min(begin + turn, settings.steps))
    for row in rows:
        rank.send(row.outcome(sample=rank.rank == 0 and row is rows[-1]))
    dist.barrier()  # no rank exits while another still needs it


def _warm_up(settings: Settings, tokens: torch.Tensor) -> None:
    """Computes one step without a row, because the first step of a process is slower."""
    model = CharGPT(Shape(alphabet=len(text.ALPHABET)))
    x, y = text.batch(tokens, settings.batch, model.shape.context, torch.Generator())
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own


class _Training:
    """One row on this rank: its model, and what its steps gave."""

    def __init__(
        self,
        rank: Rank,
        row: Row,
        settings: Settings,
        texts: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._rank, self._row, self._settings = rank, row, settings
        self._text, self._held_out = texts
        torch.manual_seed(settings.seed)
        self._model = CharGPT(Shape(alphabet=len(text.ALPHABET)))
        self._optimizer = row.optimizer(self._model.parameters())
        self._random = torch.Generator().manual_seed(settings.seed * 1000 + rank.rank)
        others = tcp_sockets()
        own = None if row.backend == "pycomm" else dist.new_group(backend=row.backend)
        sockets = tcp_sockets() - others if own else None
        self._parallel = row.wrap(self._model, self._optimizer, own)
        dist.barrier()  # all ranks have received the parameters
        self._counter = Counter(sockets)
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._sent: list[int] = []

    def run(self, begin: int, end: int) -> None:
        """Trains the steps from `begin` to `end`."""
        self._counter.resume()
        for step in range(begin, end):
            start = time.perf_counter()
            self._losses.append(self._step(step))
            self._seconds.append(time.perf_counter() - start)
            self._sent.append(self._counter.total())
            if self._rank.rank == 0:
                self._rank.send(Progress(self._row.key, step + 1, self._losses[-1]))

    def outcome(self, sample: bool) -> Outcome:
        """Ends the training and evaluates the model; with `sample` the model writes text."""
        self._parallel.end()
        return Outcome(
            self._row.key,
            self._losses,
            self._seconds,
            self._sent,
            self._counter.name,
            _digest(self._model),
            _evaluate(self._model, self._held_out),
            _sample(self._model) if sample else "",
            sum(p.numel() for p in self._model.parameters()),
        )

    def _step(self, step: int) -> float:
        """One step; returns the loss of this rank's batch."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._row.rate * _schedule(self._settings, step)
        context = self._model.shape.context
        x, y = text.batch(self._text, self._settings.batch, context, self._random)
        loss = F.cross_entropy(self._parallel.forward(x).flatten(0, 1), y.flatten())
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        self._parallel.step()
        return loss.item()


def _schedule(settings: Settings, step: int) -> float:
    """Linear warm-up, then half a cosine down to a twentieth of the peak."""
    rising = min(1.0, (step + 1) / settings.warmup)
    cosine = math.cos(math.pi * step / settings.steps)
    return rising * (0.525 + 0.475 * cosine)


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
