"""The loss scale of the gradients of a pass."""

from __future__ import annotations

import torch
from torch import Tensor

from pycomm._training import coalesced
from pycomm.group import Group


class LossScale:
    """The scale of this rank's scaler; without data that of the ranks with data, whose scalers
    change it while this rank's waits for the end of join().

    Args:
        scaler: of the training; None: there is none, or the user did not pass it.

    Attributes:
        others: the scale of the ranks with data.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None = None) -> None:
        self._scaler = scaler
        self.others = 1.0

    @property
    def mine(self) -> float | None:
        """The scale of this rank; None: there is no scaler."""
        scaler = self._scaler
        return scaler.get_scale() if scaler is not None and scaler.is_enabled() else None

    def of_pass(self, idle: bool) -> float | None:
        """The scale of a pass; `idle`: this rank has no data. May wait for the scaler's device."""
        scale = self.unread(idle)
        return scale if scale is None else float(scale)

    def unread(self, idle: bool) -> Tensor | float | None:
        """The same without a wait: a number on the scaler's device."""
        scaler = self._scaler
        if scaler is None or not scaler.is_enabled():
            return None
        if idle:
            return self.others
        found = getattr(scaler, "_scale", None)  # torch's get_scale() reads it; None before use
        return found if isinstance(found, Tensor) else scaler.get_scale()

    def sync_from(self, src: int, group: Group) -> None:
        """Takes the state of the scaler of rank `src`. Collective."""
        scaler = self._scaler
        if scaler is not None:
            scaler.load_state_dict(coalesced.bcast_value(scaler.state_dict(), src, group))
