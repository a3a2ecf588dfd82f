"""What travels whole: momentum SGD on averaged gradients, as torch.optim.SGD does it, bit for bit.

Called by transaction.py, on every rank with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pycomm.compress.parameter_state import ParameterState, line

__all__ = ["apply_momentum", "clip_averaged"]


def clip_averaged(gradients: Sequence[Tensor], limit: float, together: bool) -> None:
    """Scales each gradient, or all `together`, to a norm of at most `limit`, in place."""
    norms = [float(torch.linalg.vector_norm(g, dtype=torch.float64)) for g in gradients]
    if together:
        norms = [math.hypot(*norms)] * len(norms)
    for gradient, norm in zip(gradients, norms, strict=True):
        if math.isfinite(norm) and norm > limit:
            gradient.mul_(limit / norm)


def apply_momentum(memory: ParameterState, gradient: Tensor) -> None:
    """Turns an averaged gradient into what the optimizer subtracts; u is torch's velocity."""
    hyper, u, x = memory.hyper, memory.u, line(gradient)
    if hyper.weight_decay:
        x.add_(line(memory.parameter), alpha=hyper.weight_decay)
    if hyper.momentum:
        u.mul_(hyper.momentum).add_(x)
        if hyper.nesterov:
            x.add_(u, alpha=hyper.momentum)
        else:
            x.copy_(u)
