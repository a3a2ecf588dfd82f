"""Models trained with quantized gradients, for the tests of them."""

from collections.abc import Sequence
from typing import Any

import torch
from small_models import batch, seeded, step_on
from torch import Tensor, nn
from torch.nn import functional as F

import pycomm


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def wide(seed: int = 1) -> nn.Module:
    """Some parameters have several blocks."""
    layers = nn.Linear(16, 400), nn.Tanh(), nn.Linear(400, 20), nn.Tanh(), nn.Linear(20, 3)
    return seeded(nn.Sequential(*layers), seed)


def train(
    group: pycomm.Group, model: nn.Module, steps: range = range(5), **form: Any
) -> pycomm.DataParallel:
    parallel = pycomm.DataParallel(model, **{"compression": pycomm.Quantize(), **form})
    optimizer = adam(parallel)
    for step in steps:
        step_on(parallel, batch(group.rank, step), optimizer)
    return parallel


def total_residual(state: dict[str, Any], name: str) -> float:
    """The sum of a parameter's residuals."""
    return sum(
        float(rank[key][name].double().sum())
        for rank in state["ranks"]
        for key in ("residual", "owner_residual")
    )


def check_accumulated(results: Sequence[Sequence[Tensor]]) -> None:
    """Each rank's gradients of wide() at 8 bits are near the mean of all ranks, over two batches of
    each."""
    exact = wide()
    for rank in range(len(results)):
        for step in range(2):
            x, y = batch(rank, step)
            (F.mse_loss(exact(x), y) / len(results)).backward()
    for found in results:
        for got, p in zip(found, exact.parameters(), strict=True):
            assert p.grad is not None
            torch.testing.assert_close(got, p.grad, atol=2e-2 * float(p.grad.abs().max()), rtol=0)
