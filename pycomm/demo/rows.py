"""The training methods that the demo compares, one Row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from pycomm.compress.dgc import DGC
from pycomm.compress.topk import TopK
from pycomm.optim.local_sgd import LocalSGD
from pycomm.parallel.data_parallel import DataParallel

CLIP_NORM = 1.0
SGD_RATE = 0.5
ADAMW_RATE = 0.006


def _nothing() -> None:
    """The default for Parallel.end."""


@dataclass(frozen=True)
class Parallel:
    """A parallel model: the module for forward, the step after backward, and the final action."""

    forward: nn.Module
    step: Callable[[], object]
    end: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Row:
    """One method: its key for --rows, its name in the table, its torch.distributed backend."""

    key: str
    name: str
    backend: str
    """pycomm: the default group, which such rows share; another one: a group of its own."""
    wrap: Callable[[nn.Module, Optimizer, dist.ProcessGroup | None], Parallel]
    """Runs on every rank with equal models on all ranks, and the row's own group."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    rate: float
    """The peak of the learning rate."""


def _sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.0, momentum=0.9)


def _adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.0, betas=(0.7, 0.95), weight_decay=0.0)


def _adamw_without_momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.0, betas=(0.0, 0.99), weight_decay=0.0)


def _clipped(model: nn.Module, step: Callable[[], object]) -> Callable[[], object]:
    def clip_and_step() -> object:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        return step()

    return clip_and_step


def _dense(model: nn.Module, optimizer: Optimizer, own: dist.ProcessGroup | None) -> Parallel:
    forward = DistributedDataParallel(model, process_group=own)
    return Parallel(forward, _clipped(model, optimizer.step))


def _sparse(model: nn.Module, optimizer: Optimizer, _: object) -> Parallel:
    """Sends 0.1 % of all gradients after a sparsity warm-up of 100 steps; DGC clips itself."""
    dgc = DGC(
        optimizer,
        rampup_step=100,
        sparsity=[0.75, 0.9375, 0.984375, 0.996, 0.999],
        clip_norm=CLIP_NORM,
        clip="global",
        select="model",
        min_count=0,
    )
    return Parallel(DataParallel(model, compression=dgc), optimizer.step)


def _local(model: nn.Module, optimizer: Optimizer, _: object) -> Parallel:
    """Averages after each of the first 100 steps, then after every eighth step."""
    local = LocalSGD(model, optimizer, k_steps=8, begin_step=100)
    return Parallel(model, _clipped(model, local.step), local.average)


def _updates(model: nn.Module, optimizer: Optimizer, _: object) -> Parallel:
    """Sends 200 times fewer bytes: the largest updates of AdamW, one bit for each."""
    local = LocalSGD(model, optimizer, compression=TopK(ratio=200), clip_norm=CLIP_NORM)
    return Parallel(model, local.step)


ROWS = {
    row.key: row
    for row in (
        Row("gloo", "gloo dense", "gloo", _dense, _sgd, SGD_RATE),
        Row("pycomm", "pycomm dense", "pycomm", _dense, _sgd, SGD_RATE),
        Row("dgc", "pycomm DGC 99.9 %", "pycomm", _sparse, _sgd, SGD_RATE),
        Row("local", "pycomm LocalSGD", "pycomm", _local, _sgd, SGD_RATE),
        Row("adamw", "AdamW dense", "pycomm", _dense, _adamw, ADAMW_RATE),
        Row("topk", "AdamW TopK 200", "pycomm", _updates, _adamw_without_momentum, ADAMW_RATE),
    )
}
