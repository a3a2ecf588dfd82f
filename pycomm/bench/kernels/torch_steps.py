"""A DGC step composed of torch's operations, for comparison with `dgc_step`.

A step returns the values that it sends. libraries.py has more such steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tensors:
    """The state of a step, updated in place: float32 [count]."""

    u: Tensor
    v: Tensor
    k: int
    momentum: float


Step = Callable[[Tensors, Tensor], Tensor]
Choose = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Of an array, the k largest magnitudes (or the elements that have them), and their indices."""


def torch_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The two operations."""
    largest = x.abs().topk(k, sorted=False)
    return largest.values, largest.indices


def eager(t: Tensors, grad: Tensor) -> Tensor:
    """One operation after another; exact."""
    t.u.mul_(t.momentum).add_(grad)
    t.v.add_(t.u)
    return send(t, t.v.abs().topk(t.k, sorted=False).indices)


def compiled(t: Tensors, grad: Tensor) -> Tensor:
    """The same, with the update and the magnitudes in one compiled loop."""
    return send(t, compiled_update()(t.u, t.v, grad, t.momentum).topk(t.k, sorted=False).indices)


def sampled(t: Tensors, grad: Tensor) -> Tensor:
    """The method of DGC's authors: a threshold from a sample of 1 %, moved until between 0.8 and
    1.3 of k elements reach it, 10 times at most. How many are sent is not exact, nor which."""
    t.u.mul_(t.momentum).add_(grad)
    t.v.add_(t.u)
    magnitudes = t.v.abs()
    stride = 100
    start = int(torch.randint(stride, ()))
    sample = magnitudes[start::stride]
    rank = max(1, math.ceil(t.k / stride))
    threshold = sample.topk(min(rank, sample.numel()), sorted=False).values.min()
    reached = (magnitudes >= threshold).nonzero().view(-1)
    for _ in range(10):
        if reached.numel() > 1.3 * t.k:  # keep the largest of those
            best = magnitudes[reached].topk(t.k, sorted=False).indices
            reached = reached[best]
        elif reached.numel() < 0.8 * t.k:
            threshold = threshold * 0.8
            reached = (magnitudes >= threshold).nonzero().view(-1)
        else:
            break
    return send(t, reached)


def send(t: Tensors, indices: Tensor) -> Tensor:
    """Removes the values at these indices from u and v, and returns them."""
    values = t.v[indices]
    t.u.index_fill_(0, indices, 0)
    t.v.index_fill_(0, indices, 0)
    return values


@cache
def compiled_update() -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """update(u, v, grad, momentum): u and v in place, and the magnitudes of v."""

    def update(u: Tensor, v: Tensor, grad: Tensor, momentum: float) -> Tensor:
        u.mul_(momentum).add_(grad)
        v.add_(u)
        return v.abs()

    return torch.compile(update, dynamic=True)


SAMPLED = "DGC authors"
"""Its packets are not exact, and it waits to learn their number of elements."""

TORCH_STEPS: dict[str, Step] = {
    "eager": eager,
    "torch.compile": compiled,
    SAMPLED: sampled,
}
