"""pycomm.StaticLossScaler: a constant loss scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pycomm.errors import InvalidArgument

__all__ = ["StaticLossScaler"]


class StaticLossScaler(torch.amp.GradScaler):
    """torch's GradScaler with a constant scale: it only skips steps with Inf or NaN.

        scaler.scale(loss).backward();  scaler.step(optimizer);  scaler.update()

    Args:
        scale: factor of the loss; finite and above 0.
        device: the device type of the gradients.

    Raises:
        InvalidArgument: `scale` is invalid.
    """

    def __init__(self, scale: float = 1024.0, device: str = "cpu") -> None:
        if not 0 < scale < float("inf"):
            raise InvalidArgument(f"invalid scale: got {scale}, expected a finite number above 0")
        super().__init__(device, init_scale=scale)
        self._constant = float(scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of GradScaler; the loaded scale becomes the constant one."""
        super().load_state_dict(state_dict)
        self._constant = float(self.get_scale())

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends an iteration; changes the scale only to a given `new_scale`."""
        if new_scale is not None:
            self._constant = float(new_scale)
        super().update(self._constant)
