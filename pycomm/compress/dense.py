"""Momentum SGD on averaged, uncompressed gradients, bit for bit as in torch.optim.SGD."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pycomm.compress.parameter_state import ParameterState, flat_view


def clip_gradients(
    gradients: Sequence[Tensor],
    limit: float,
    together: bool,
    whole: Callable[[float], float] = float,
) -> None:
    """Clips each gradient, or all `together`, to a norm of at most `limit`, in place.

    Args:
        gradients: all those of this rank.
        limit: of the norm.
        together: clip to the norm of all.
        whole: gives that norm from the one of `gradients`, if other ranks have shards.
    """
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    norms = [float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in dense]
    if together:
        norms = [whole(math.hypot(*norms))] * len(norms)
    for gradient, norm in zip(gradients, norms, strict=True):
        if math.isfinite(norm) and norm > limit:
            gradient.mul_(limit / norm)


def apply_momentum(memory: ParameterState, gradient: Tensor) -> None:
    """Turns an averaged gradient into the update, in place; u is torch's velocity."""
    hyper, u, x = memory.hyper, memory.u, flat_view(gradient)
    decay = hyper.weight_decay or memory.late_decay
    if decay:
        x.add_(flat_view(memory.parameter), alpha=decay)
    if hyper.momentum:
        u.mul_(hyper.momentum).add_(x)
        if hyper.nesterov:
            x.add_(u, alpha=hyper.momentum)
        else:
            x.copy_(u)
