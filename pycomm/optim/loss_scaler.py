"""A static loss scale."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pycomm._arguments import Check, check_fields, number, positive, whole
from pycomm._training.arguments import check_scalar, device_of
from pycomm.errors import InvalidArgument

OF_A_SCALER: dict[str, Check] = {
    "scale": functools.partial(positive, other=""),
    "growth_factor": number,
    "backoff_factor": number,
    "growth_interval": whole,
    "_growth_tracker": whole,
}


class StaticLossScaler(torch.amp.GradScaler):
    """torch's GradScaler with a constant scale; it only skips steps with Inf or NaN.

        scaler.scale(loss).backward();  scaler.step(optimizer);  scaler.update()

    Args:
        scale: factor of the loss; finite and above 0.
        device: type of the gradients' device, "cpu" or "cuda".

    Raises:
        InvalidArgument: the scale is not a finite number above 0, or there is no such device.
    """

    def __init__(self, scale: float = 1024.0, device: str = "cpu") -> None:
        self._constant = positive("scale", scale, "")
        super().__init__(device_of("device", device).type, init_scale=self._constant)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state; the loaded scale becomes the constant scale.

        Args:
            state_dict: from state_dict() of this class or of torch.amp.GradScaler.

        Raises:
            InvalidArgument: values are missing, as in the state of a disabled scaler.
        """
        check_fields("state_dict", state_dict, OF_A_SCALER)
        super().load_state_dict(state_dict)
        self._constant = float(self.get_scale())

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends an iteration. The scale changes only if `new_scale`, a number above 0, is given.

        Raises:
            InvalidArgument: `new_scale` is not a finite number above 0.
        """
        if new_scale is not None:
            check_scalar("new_scale", new_scale)
            self._constant = positive("new_scale", float(new_scale), "")
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
