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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pycomm
from benchmarks.support import command
from benchmarks.training.convergence import optimizers_of, parallel_of
from benchmarks.training.methods import METHODS
from benchmarks.training.workloads import WORKLOADS
from pycomm.testing import run_ranks

USUAL = ["dense", "dgc", "adamw", "adamw quantize 3 8", "adamw quantized updates 1 8"]
USUAL += ["adamw topk 200", "muon", "muon topk 50", "soap", "soap topk 200"]
STEPS = 3
SMALL = 64  # width of the first model
RATE = 1e-4


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
    counts: dict[str, Any] = {"ranks": (4, ""), "width": (512, "of a layer"), "layers": (64, "")}
    parser = command.parser("memory", __doc__, **counts)
    command.add_names(parser, "methods", METHODS, USUAL)
    options = parser.parse_args(argv)
    if min(options.ranks - 1, options.width, options.layers) < 1:
        parser.error("at least 2 ranks and 1 layer are needed")
    found = []
    for method in command.progress(options.methods, "memory"):
        ranks = run_ranks(
            options.ranks, _work, method, options.width, options.layers,
            transport="", processes=True, timeout_s=600.0,
        )  # fmt: skip
        # Of the rank that takes most, bytes for each parameter.
        after, highest = map(max, zip(*ranks, strict=True))
        found.append({"method": method, "after_step": after, "in_step": highest})
    settings = {"ranks": options.ranks, "parameters": options.layers * options.width**2}
    command.report(options.json, settings=settings, rows=found)
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
