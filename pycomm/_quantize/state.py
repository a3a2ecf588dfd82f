"""Error feedback: what a rank has not sent yet, as a sender and as an owner of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycomm._quantize.layout import Layout, fold
from pycomm.errors import InvalidArgument

__all__ = ["Feedback", "QuantizeState"]

Floats = NDArray[np.float32]
VERSION = 1


class Feedback:
    """The residuals of one layout, before and after an exchange; commit() exchanges both.

    Attributes:
        layout: the blocks.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._pairs = [
            (np.zeros(layout.count, np.float32), np.zeros(layout.own_count, np.float32))
            for _ in range(2)
        ]
        self._turn = 0

    @property
    def current(self) -> tuple[Floats, Floats]:
        """The residual [count] and the owner residual [own_count]."""
        return self._pairs[self._turn]

    @property
    def next(self) -> tuple[Floats, Floats]:
        """The same after the exchange."""
        return self._pairs[1 - self._turn]

    def commit(self) -> None:
        """The exchange is complete on this rank."""
        self._turn = 1 - self._turn


class QuantizeState:
    """The residuals of one array, for pycomm.all_reduce; made by `Quantize.state`.

    The first call fixes the number of elements and the ranks.
    """

    def __init__(self) -> None:
        self._feedback: Feedback | None = None

    def feedback(self, layout: Layout) -> Feedback:
        """The residuals of this layout; for pycomm.all_reduce.

        Raises:
            InvalidArgument: the state is of another array or other ranks.
        """
        if self._feedback is None:
            self._feedback = Feedback(layout)
        old = self._feedback.layout
        if (old.count, old.rank, old.size) != (layout.count, layout.rank, layout.size):
            raise InvalidArgument(
                f"all_reduce: invalid state: got one of {old.count} elements on rank {old.rank} of "
                f"{old.size}, expected {layout.count} elements on rank {layout.rank} of "
                f"{layout.size}: use one state for each array"
            )
        return self._feedback

    def residual(self) -> Floats | None:
        """What this rank has not sent: a float32 copy [count]; None before the first call.

        The results of op="sum" plus the residuals of all ranks are the sum of all arrays.
        """
        if self._feedback is None:
            return None
        layout, (residual, owned) = self._feedback.layout, self._feedback.current
        residual = residual.copy()
        fold(residual, owned, 0, layout.rank, layout.size)
        return residual

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: version, count, rank, size, residual and owner_residual, copies of
        NumPy arrays. It loads on the same rank of as many ranks, bit for bit."""
        if self._feedback is None:
            return {"version": VERSION, "count": None}
        layout, (residual, owned) = self._feedback.layout, self._feedback.current
        return {
            "version": VERSION,
            "count": layout.count,
            "rank": layout.rank,
            "size": layout.size,
            "residual": residual.copy(),
            "owner_residual": owned.copy(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores the result of state_dict().

        Raises:
            InvalidArgument: another version, or arrays of another size; nothing changes.
        """
        if saved.get("version") != VERSION:
            raise InvalidArgument(
                f"QuantizeState: invalid state version: got {saved.get('version')!r}, expected "
                f"{VERSION}"
            )
        if saved["count"] is None:
            self._feedback = None
            return
        layout = Layout([(saved["count"], 0)], saved["rank"], saved["size"])
        made = Feedback(layout)
        for new, name in zip(made.current, ("residual", "owner_residual"), strict=True):
            if np.shape(saved[name]) != new.shape:
                raise InvalidArgument(
                    f"QuantizeState: invalid {name}: got shape {np.shape(saved[name])}, expected "
                    f"{new.shape}"
                )
            new[:] = saved[name]
        self._feedback = made
