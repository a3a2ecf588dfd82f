"""`python -m benchmarks memory`: bytes of memory for each parameter, by way to train.

New processes train a stack of square layers by each method of the convergence benchmark, first a
small one, so that code and buffers of fixed size are loaded, then a large one. The figures are the
growth of a rank's resident memory (anonymous and shared pages) over the large model's parameters:
after a step, with its gradients, and the highest during a step. Parameters and gradients take 4
bytes each, the moments of AdamW 8.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import pycomm
from benchmarks.support import command
from benchmarks.training.convergence import optimizers_of, parallel_of
from benchmarks.training.methods import METHODS
from benchmarks.training.workloads import WORKLOADS
from pycomm.bench.support.sizes import names
from pycomm.testing import run_ranks

USUAL = ["dense", "dgc", "adamw", "adamw quantize 3 8", "adamw quantized updates 1 8"]
USUAL += ["adamw topk 200", "muon", "muon topk 50", "soap", "soap topk 200"]
STEPS = 3
SMALL = 64  # width of the first model
RATE = 1e-4


@dataclass(frozen=True)
class Row:
    """Of the rank that takes most."""

    method: str
    after_step: float  # bytes for each parameter
    in_step: float  # the same, the highest


class Stack(nn.Module):
    """Square layers and a vector: Muon has the matrices inside of blocks, AdamW the others."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """The output of the last layer."""
        for layer in self.blocks:
            x = layer(x)
        return x * self.scale


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns the exit status."""
    parser = command.parser("memory", __doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=512, help="of a layer (%(default)s)")
    parser.add_argument("--layers", type=int, default=64, help="(%(default)s)")
    usual = ",".join(USUAL)
    parser.add_argument("--methods", type=names([*METHODS]), default=usual, help="(%(default)s)")
    options = parser.parse_args(argv)
    if min(options.ranks - 1, options.width, options.layers) < 1:
        parser.error("at least 2 ranks and 1 layer are needed")
    found = []
    for method in command.progress(options.methods, "memory"):
        ranks = run_ranks(
            options.ranks, _work, method, options.width, options.layers,
            transport="", processes=True, timeout_s=600.0,
        )  # fmt: skip
        after, highest = zip(*ranks, strict=True)
        found.append(Row(method, max(after), max(highest)))
    settings = {"ranks": options.ranks, "parameters": options.layers * options.width**2}
    command.report(options.json, settings=settings, rows=[asdict(row) for row in found])
    return 0


def _work(group: pycomm.Group, method: str, width: int, layers: int) -> tuple[float, float]:
    """A rank: bytes for each parameter, after a step and the highest."""
    torch.manual_seed(0)
    _train(group, method, Stack(SMALL, layers))
    before = _resident()
    model = Stack(width, layers)
    after, highest = _train(group, method, model)
    count = sum(p.numel() for p in model.parameters())
    return (after - before) / count, (highest - before) / count


def _train(group: pycomm.Group, method: str, model: Stack) -> tuple[int, int]:
    """Some steps; resident bytes after the last one, and the highest during it."""
    workload = WORKLOADS["text"]
    optimizers = optimizers_of(model, workload, METHODS[method])
    for parameters in [one for optimizer in optimizers for one in optimizer.param_groups]:
        parameters["lr"] = RATE
    parallel = parallel_of(group, model, optimizers, workload, METHODS[method], STEPS)
    x = torch.randn(4, len(model.scale))
    for _ in range(STEPS):
        model.zero_grad()
        _reset_highest()
        loss = parallel.forward(x).square().mean()
        loss.backward()
        parallel.step(loss.detach())
    highest = _highest()
    parallel.end()
    return _resident(), highest


def _status() -> dict[str, int]:
    """Bytes by name, of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split()[0][:-1]: int(line.split()[1]) << 10 for line in lines if " kB" in line}


def _resident() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    status = _status()
    return status["RssAnon"] + status["RssShmem"]


def _highest() -> int:
    status = _status()
    return status["VmHWM"] - status["RssFile"]


def _reset_highest() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # proc(5)
