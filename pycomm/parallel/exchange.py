"""What happens to a full bucket: the interface between the reducer and what exchanges gradients.

`Mean` is the dense exchange; pycomm.compress has the other one. Called by reducer.py.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pycomm.calls import Work
from pycomm.lanes import Lanes
from pycomm.parallel.buckets import Bucket

__all__ = ["Exchange", "Mean"]


class Exchange(Protocol):
    """Takes the buckets of one backward pass, all ranks in the same order, then ends the pass.

    An exchange that fails raises from any method; what it had taken so far counts as not sent.
    """

    def compresses(self, name: str, parameter: Tensor) -> bool:
        """Whether this gradient travels in buckets of its own kind."""
        ...

    def add(self, bucket: Bucket) -> None:
        """All gradients of the bucket are there: they may travel."""
        ...

    def finish(self, idle: bool) -> None:
        """Returns when every gradient is what the optimizer shall see.

        `idle`: this rank has no data any more and only takes part.
        """
        ...

    def cancel(self) -> None:
        """Forgets a pass that did not reach its end."""
        ...


class Mean:
    """Sum over all ranks, divided by their number once, after the last addition."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._works: list[Work] = []

    def compresses(self, name: str, parameter: Tensor) -> bool:
        """Never."""
        return False

    def add(self, bucket: Bucket) -> None:
        """Starts the all-reduce of the bucket."""
        self._works.append(self._lanes.all_reduce(bucket.flat, "avg"))

    def finish(self, idle: bool) -> None:
        """Waits for all that was started."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def cancel(self) -> None:
        """Waits as well: the buckets must not be written to meanwhile."""
        self.finish(idle=False)
