"""A static loss scale."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pycomm.errors import InvalidArgument

__all__ = ["StaticLossScaler", "refuse_unscaled"]


class StaticLossScaler(torch.amp.GradScaler):
    """torch's GradScaler with a constant scale; it only skips steps with Inf or NaN.

        scaler.scale(loss).backward();  scaler.step(optimizer);  scaler.update()

    Args:
        scale: factor of the loss; finite and above 0.
        device: type of the gradients' device, "cpu" or "cuda".

    Raises:
        InvalidArgument: the scale is not a finite number above 0.
    """

    def __init__(self, scale: float = 1024.0, device: str = "cpu") -> None:
        if not 0 < scale < float("inf"):
            raise InvalidArgument(f"invalid scale: got {scale}, expected a finite number above 0")
        super().__init__(device, init_scale=scale)
        self._constant = float(scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state; the loaded scale becomes the constant scale.

        Args:
            state_dict: from state_dict() of this class or of torch.amp.GradScaler.

        Raises:
            RuntimeError: the state is empty, as that of a disabled scaler (from torch).
        """
        super().load_state_dict(state_dict)
        self._constant = float(self.get_scale())

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends an iteration. The scale changes only if `new_scale`, a number above 0, is given."""
        if new_scale is not None:
            self._constant = float(new_scale)
        super().update(self._constant)


def refuse_unscaled(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Call it in a step() that a GradScaler calls, and that divides gradients by its scale.

    Raises:
        InvalidArgument: the scaler's unscale_() of one of these optimizers, which step() calls, has
            divided them.
    """
    frame = sys._getframe(1)
    scaler = None
    while frame.f_back is not None and not isinstance(scaler, torch.amp.GradScaler):
        frame = frame.f_back
        scaler = frame.f_locals.get("self")
    states = getattr(scaler, "_per_optimizer_states", {})
    if any(id(one) in states and states[id(one)]["stage"].name == "UNSCALED" for one in optimizers):
        raise InvalidArgument(
            "LocalSGD: scaler.unscale_(optimizer) was called, and scaler.step(local) would divide "
            "the gradients again: call scaler.unscale_(local)"
        )
