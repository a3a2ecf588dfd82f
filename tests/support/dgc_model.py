"""A second implementation of DGC, for all ranks in one process.

Plain loops over whole tensors with torch, from docs/compression.md; shares no code with pycomm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


def largest(v: Tensor, k: int) -> Tensor:
    """The k largest magnitudes of a flat tensor: NaN before Inf before all, lower indices first."""
    rank = v.abs().double()
    rank[v.isinf()] = 1e308
    rank[v.isnan()] = float("inf")
    return torch.sort(rank, descending=True, stable=True).indices[:k].sort().values


@dataclass
class Model:
    """u and v of one parameter for all ranks, and the parameter.

    `sum_convention`: gradients and decay are divided by the number of ranks, the sum is not.
    """

    w: Tensor
    ranks: int
    momentum: float = 0.9
    decay: float = 0.0
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None
    sum_convention: bool = False
    u: list[Tensor] = field(init=False)
    v: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.w = self.w.flatten().clone()
        self.u = [torch.zeros_like(self.w) for _ in range(self.ranks)]
        self.v = [torch.zeros_like(self.w) for _ in range(self.ranks)]

    def step(self, gradients: Sequence[Tensor], k: int, lr: float) -> None:
        n = self.ranks
        total = torch.zeros_like(self.w)
        for rank, gradient in enumerate(gradients):
            g = gradient.flatten().clone()
            if self.clip is not None:
                limit = self.clip * n**0.5
                g *= min(1.0, limit / float(g.double().norm()))
            g = g + self.decay * self.w
            if self.sum_convention:
                g = g / n
            m, u, v = self.momentum, self.u[rank], self.v[rank]
            if self.nesterov:
                u.copy_(m * (u + g))
                v += u + g
            else:
                u.copy_(m * u + g)
                v += u
            chosen = largest(v, k)
            total[chosen] += v[chosen]
            v[chosen] = 0
            if self.masking:
                u[chosen] = 0
        self.w -= lr * (total if self.sum_convention else total / n)
