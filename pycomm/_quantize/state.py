"""Error feedback: what a rank has not sent yet, as a sender and as an owner of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycomm._arguments import Check, check_fields, check_version, integer, refuse, whole
from pycomm._core_api import arrays
from pycomm._quantize.layout import Layout, own_places
from pycomm.errors import InvalidArgument
from pycomm.kernels.inputs import MOST_ELEMENTS

Floats = NDArray[np.float32]
VERSION = 1
MOST_RANKS = 1 << 16  # of a saved state


def _zeros(count: int) -> Floats:
    return np.zeros(count, np.float32)


class Feedback:
    """The residuals of one layout, before and after an exchange; turn() exchanges both.

    Args:
        layout: the blocks.
        zeros: makes float32 arrays [count] where the elements are.

    Attributes:
        layout: as given.
        current: the residual [count] and the owner residual [own_count].
        next: the same after the exchange.
    """

    def __init__(self, layout: Layout, zeros: Callable[[int], Any] = _zeros) -> None:
        self.layout = layout
        self.current, self.next = ((zeros(layout.count), zeros(layout.own_count)) for _ in range(2))

    def turn(self) -> None:
        """The exchange is complete on this rank; or it was not, after all."""
        self.current, self.next = self.next, self.current


class QuantizeState:
    """The residuals of one array, for pycomm.all_reduce; made by `Quantize.state`.

    The first call fixes the number of elements and the ranks. The residuals are where the array of
    the last call was.
    """

    def __init__(self) -> None:
        self._feedback: Feedback | None = None

    def feedback(self, layout: Layout, like: arrays.ArrayRef) -> Feedback:
        """The residuals of this layout, where `like` is; for pycomm.all_reduce.

        Raises:
            InvalidArgument: the state is of another array or other ranks.
        """
        if self._feedback is None:
            self._feedback = _feedback_at(layout, like)
        old = self._feedback.layout
        if (old.count, old.rank, old.size) != (layout.count, layout.rank, layout.size):
            raise InvalidArgument(
                f"all_reduce: invalid state: got one of {old.count} elements on rank {old.rank} of "
                f"{old.size}, expected {layout.count} elements on rank {layout.rank} of "
                f"{layout.size}: use one state for each array"
            )
        if arrays.as_array_ref(self._feedback.current[0], "residual").device != like.device:
            moved = _feedback_at(layout, like)
            for new, mine in zip(moved.current, self._current(), strict=True):
                new[:] = arrays.from_host(mine, like)
            self._feedback = moved
        return self._feedback

    def _current(self) -> list[Floats]:
        """Copies of the residuals in host memory."""
        assert self._feedback is not None
        return [np.array(arrays.to_host(x)) for x in self._feedback.current]

    def residual(self) -> Floats | None:
        """What this rank has not sent: a float32 copy [count]; None before the first call.

        The results of op="sum" plus the residuals of all ranks are the sum of all arrays.
        """
        if self._feedback is None:
            return None
        layout, (residual, owned) = self._feedback.layout, self._current()
        residual[own_places(layout.count, 0, layout.rank, layout.size)] += owned
        return residual

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: version, count, rank, size, residual and owner_residual, copies of
        NumPy arrays. It loads on the same rank of as many ranks, bit for bit."""
        if self._feedback is None:
            return {"version": VERSION, "count": None}
        layout, (residual, owned) = self._feedback.layout, self._current()
        return {
            "version": VERSION,
            "count": layout.count,
            "rank": layout.rank,
            "size": layout.size,
            "residual": residual,
            "owner_residual": owned,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores the result of state_dict().

        Raises:
            InvalidArgument: another version, missing values, or arrays of another size or dtype;
                nothing changes.
        """
        check_version("QuantizeState", saved, VERSION)
        check_fields("state", saved, {"count": _count})
        if saved["count"] is None:
            self._feedback = None
            return
        check_fields("state", saved, OF_A_CALL)
        rank, size = saved["rank"], integer("size", saved["size"], saved["rank"] + 1, MOST_RANKS)
        made = Feedback(Layout([(saved["count"], 0)], rank, size))
        for new, name in zip(made.current, ("residual", "owner_residual"), strict=True):
            if len(saved[name]) != len(new):
                raise InvalidArgument(
                    f"QuantizeState: invalid {name}: got shape {np.shape(saved[name])}, expected "
                    f"({len(new)},)"
                )
            new[:] = arrays.to_host(saved[name])
        self._feedback = made


def _count(name: str, value: Any) -> None:
    if value is not None:
        integer(name, value, 0, MOST_ELEMENTS)


def _residual(name: str, value: Any) -> None:
    found = arrays.as_array_ref(value, name)
    if found.dtype != "float32" or len(found.shape) != 1:
        refuse(name, value, "a flat array of float32")


OF_A_CALL: dict[str, Check] = {
    "rank": whole,
    "size": whole,
    "residual": _residual,
    "owner_residual": _residual,
}


def _feedback_at(layout: Layout, like: arrays.ArrayRef) -> Feedback:
    """Residuals of 0 where `like` is."""
    if like.device.kind == "cpu":
        return Feedback(layout)
    return Feedback(layout, lambda count: arrays.new(like, (count,), "float32", zeros=True))
