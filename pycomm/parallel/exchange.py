"""What happens to a full bucket: the interface between the reducer and what exchanges gradients.

`Mean` is the dense exchange; pycomm.compress has the other one. Called by reducer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pycomm.calls import Work
from pycomm.communicators import CommunicatorPool
from pycomm.group import Group

__all__ = ["Exchange", "Mean"]


class Exchange(Protocol):
    """Takes the buckets of one backward pass, all ranks in the same order, then ends the pass.

    An exchange that fails raises from any method; what it had taken so far counts as not sent.

    Attributes:
        idle: set while this rank has no data and only takes part in a pass of the others.
    """

    idle: bool

    def compresses(self, parameter: Tensor) -> bool:
        """Whether its gradient travels in buckets of their own kind."""
        ...

    def add(self, flat: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """All gradients of a bucket are there, as views into `flat`: they may travel."""
        ...

    def finish(self) -> None:
        """Returns when every gradient is what the optimizer shall see."""
        ...

    def cancel(self) -> None:
        """Forgets a pass that did not reach its end."""
        ...

    def sync_from(self, src: int) -> None:
        """Collective. What has to be the same on all ranks becomes that of rank `src`."""
        ...

    def resume_after_shrink(self, before: Group, counted: bool, src: int) -> float:
        """Collective, when the pool has shrunk from the ranks of `before` to those of today.

        A pass that failed here counts after all if `counted`: another rank has had all of it. What
        has to be the same on all becomes that of rank `src`. Gives ShrinkResult.lost_residual_norm.
        """
        ...


class Mean:
    """Sum over all ranks, divided by their number once, after the last addition."""

    def __init__(self, pool: CommunicatorPool) -> None:
        self.idle = False
        self._pool = pool
        self._works: list[Work] = []

    def compresses(self, parameter: Tensor) -> bool:
        """Never."""
        return False

    def add(self, flat: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Starts the all-reduce of the bucket."""
        self._works.append(self._pool.all_reduce(flat, "avg"))

    def finish(self) -> None:
        """Waits for all that was started."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def cancel(self) -> None:
        """Waits as well: the buckets must not be written to meanwhile."""
        self.finish()

    def sync_from(self, src: int) -> None:
        """There is nothing but gradients."""

    def resume_after_shrink(self, before: Group, counted: bool, src: int) -> float:
        """Forgets what was under way; nobody owes anything."""
        self._works = []
        return 0.0
