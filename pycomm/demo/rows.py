"""The training methods that the demo compares, one Row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from pycomm.compress.dgc import DGC
from pycomm.compress.topk import TopK
from pycomm.optim.local_sgd import LocalSGD
from pycomm.parallel.data_parallel import DataParallel

CLIP_NORM = 1.0
_SGD = partial(SGD, lr=0.0, momentum=0.9)
_ADAMW = partial(AdamW, lr=0.0, betas=(0.7, 0.95), weight_decay=0.0)
_WITHOUT_MOMENTUM = partial(AdamW, lr=0.0, betas=(0.0, 0.99), weight_decay=0.0)


@dataclass(frozen=True)
class Parallel:
    """A parallel model: the module for forward, the step after backward, and the final action."""

    forward: nn.Module
    step: Callable[[], object]
    clips: bool = False  # it clips the gradients itself
    end: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Row:
    """One method: its key for --rows, its name in the table, its torch.distributed backend."""

    key: str
    name: str
    backend: str
    """pycomm: the default group, which such rows share; another one: a group of its own."""
    wrap: Callable[[nn.Module, Optimizer, dist.ProcessGroup | None], Parallel]
    """Runs on every rank with equal models on all ranks, and the row's own group."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = _SGD
    rate: float = 0.5
    """The peak of the learning rate."""


def _dense(model: nn.Module, optimizer: Optimizer, own: dist.ProcessGroup | None) -> Parallel:
    return Parallel(DistributedDataParallel(model, process_group=own), optimizer.step)


def _sparse(model: nn.Module, optimizer: Optimizer, _: object) -> Parallel:
    """Sends 0.1 % of all gradients after a sparsity warm-up of 100 steps."""
    dgc = DGC(
        optimizer,
        rampup_step=100,
        sparsity=[0.75, 0.9375, 0.984375, 0.996, 0.999],
        clip_norm=CLIP_NORM,
        clip="global",
        select="model",
        min_count=0,
    )
    return Parallel(DataParallel(model, compression=dgc), optimizer.step, clips=True)


def _local(model: nn.Module, optimizer: Optimizer, _: object) -> Parallel:
    """Averages after each of the first 100 steps, then after every eighth step."""
    local = LocalSGD(model, optimizer, k_steps=8, begin_step=100)
    return Parallel(model, local.step, end=local.average)


def _updates(model: nn.Module, optimizer: Optimizer, _: object) -> Parallel:
    """Sends 200 times fewer bytes: the largest updates of AdamW, one bit for each."""
    local = LocalSGD(model, optimizer, compression=TopK(ratio=200), clip_norm=CLIP_NORM)
    return Parallel(model, local.step, clips=True)


ROWS = {
    row.key: row
    for row in (
        Row("gloo", "gloo dense", "gloo", _dense),
        Row("pycomm", "pycomm dense", "pycomm", _dense),
        Row("dgc", "pycomm DGC 99.9 %", "pycomm", _sparse),
        Row("local", "pycomm LocalSGD", "pycomm", _local),
        Row("adamw", "AdamW dense", "pycomm", _dense, _ADAMW, 0.006),
        Row("topk", "AdamW TopK 200", "pycomm", _updates, _WITHOUT_MOMENTUM, 0.006),
    )
}
