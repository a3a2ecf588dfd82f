"""A loss scale that stays. Called by users as pycomm.StaticLossScaler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pycomm.errors import InvalidArgument

__all__ = ["StaticLossScaler"]


class StaticLossScaler(torch.amp.GradScaler):
    """torch's GradScaler with a constant scale: steps with Inf or NaN are skipped, nothing else.

        scaler.scale(loss).backward();  scaler.step(optimizer);  scaler.update()

    Args:
        scale: what the loss is multiplied by; above 0.
        device: where gradients lie.
    """

    def __init__(self, scale: float = 1024.0, device: str = "cpu") -> None:
        if not 0 < scale < float("inf"):
            raise InvalidArgument(f"scale={scale}: a finite number above 0 is needed")
        super().__init__(device, init_scale=scale)
        self._constant = float(scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of GradScaler; the scale that is loaded is the one that stays."""
        super().load_state_dict(state_dict)
        self._constant = float(self.get_scale())

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends an iteration; the scale changes only to a `new_scale` that is given."""
        if new_scale is not None:
            self._constant = float(new_scale)
        super().update(self._constant)
