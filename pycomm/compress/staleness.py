"""How long ago each element was sent, where somebody asks: DGC's track_age. Called by dgc.py.

No part of a state: after a resume ages begin anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pycomm.compress.parameter_state import ParameterState

__all__ = ["Ages"]


class Ages:
    """int32 for each element of `memories`: after which step this rank has last sent it."""

    def __init__(self, memories: Sequence[ParameterState]) -> None:
        self._at = {m: torch.zeros(m.count, dtype=torch.int32, device=m.u.device) for m in memories}

    def sent(self, places: Iterable[tuple[ParameterState, Tensor]], step: int, whole: bool) -> None:
        """In step number `step`: all elements where it was dense, else those at `places`."""
        for memory, indices in places:
            self._at[memory][indices] = step
        for at in self._at.values() if whole else ():
            at.fill_(step)

    def summary(self, step: int) -> dict[str, float]:
        """After step number `step`: the mean and the largest age, in steps; 0 was sent in it."""
        counts = sum(at.numel() for at in self._at.values())
        if not counts:
            return {"mean": 0.0, "max": 0.0}
        total = sum(int(at.sum(dtype=torch.int64)) for at in self._at.values())
        oldest = min(int(at.min()) for at in self._at.values())
        return {"mean": step - total / counts, "max": float(step - oldest)}
