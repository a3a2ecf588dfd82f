"""The ways of training that the demo compares: data, one Row each. Called by main, training.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

CLIP_NORM = 1.0


@dataclass(frozen=True)
class Parallel:
    """A model made parallel: what to call forward on, and what to call after backward."""

    forward: nn.Module
    step: Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One way: its key for --rows, its name in the table, its torch.distributed backend."""

    key: str
    name: str
    backend: str
    wrap: Callable[[nn.Module, SGD], Parallel]
    """Runs on every rank, the process group standing and the model the same everywhere."""


def _dense(model: nn.Module, optimizer: SGD) -> Parallel:
    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()

    return Parallel(DistributedDataParallel(model), step)


ROWS = {
    row.key: row
    for row in (
        Row("gloo", "gloo dense", "gloo", _dense),
        Row("pycomm", "pycomm dense", "pycomm", _dense),
    )
}
