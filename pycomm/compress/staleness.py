"""Records when each element was last sent: DGC's track_age.

Ages are not saved; they restart at 0 after a resume.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pycomm.compress.parameter_state import ParameterState

__all__ = ["Ages"]


class Ages:
    """The last step, int32, in which this rank sent each element of `memories`."""

    def __init__(self, memories: Sequence[ParameterState]) -> None:
        self._at = {m: torch.zeros(m.count, dtype=torch.int32, device=m.u.device) for m in memories}

    def sent(self, places: Iterable[tuple[ParameterState, Tensor]], step: int, whole: bool) -> None:
        """Records step number `step`: all elements if it was dense (`whole`), else `places`."""
        for memory, indices in places:
            self._at[memory][indices] = step
        for at in self._at.values() if whole else ():
            at.fill_(step)

    def summary(self, step: int) -> dict[str, float]:
        """The mean and the largest age after step number `step`, in steps; 0: sent in that step."""
        counts = sum(at.numel() for at in self._at.values())
        if not counts:
            return {"mean": 0.0, "max": 0.0}
        total = sum(int(at.sum(dtype=torch.int64)) for at in self._at.values())
        oldest = min(int(at.min()) for at in self._at.values())
        return {"mean": step - total / counts, "max": float(step - oldest)}
