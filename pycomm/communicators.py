"""Communicators used in turn, so that the next call need not wait for the one before.

Each lane is a group of the same ranks with a thread and channels of its own; calls in different
lanes run at the same time. Not a scheduler: who calls does so in the same order on every rank.
Called by the training layer (compress, parallel).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycomm import arrays, calls, collectives
from pycomm.calls import Work
from pycomm.errors import InvalidArgument
from pycomm.group import Group, default

__all__ = ["CommunicatorPool"]

BETWEEN_HOSTS = 2  # lanes by default; within a host one call already uses all of the memory's speed


class CommunicatorPool:
    """The group itself and, for `count` > 1, groups split off it. Collective to make.

    Args:
        group: whose ranks; None is the default group.
        count: how many; None: 1 where all ranks share a host, else 2.
        hierarchical: sums go inside hosts, between hosts, inside hosts. Ignored on one host.
    """

    def __init__(
        self, group: Group | None = None, count: int | None = None, hierarchical: bool = False
    ) -> None:
        self._asked = count, hierarchical
        self._stand(group or default())

    def _stand(self, group: Group) -> None:
        count, hierarchical = self._asked
        self.group = group
        hosts = self.group._core.host_count
        if count is None:
            count = 1 if hosts == 1 else BETWEEN_HOSTS
        if count < 1:
            raise InvalidArgument(f"lanes={count}: at least one is needed")
        parts = (self.group.split(0) for _ in range(count - 1))
        self._lanes = [self.group, *(part for part in parts if part is not None)]
        self._algorithm = "hierarchical" if hierarchical and hosts > 1 else None
        self._turn = 0

    def shrink(self, timeout_s: float | None = None) -> None:
        """Collective. From now on the survivors' of the group, as Group.shrink has it."""
        self.group = self.group.shrink(timeout_s)
        self._stand(self.group)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.group.size

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        return self.group.rank

    @property
    def count(self) -> int:
        """How many lanes there are."""
        return len(self._lanes)

    def all_reduce(self, x: Any, op: str = "sum") -> Work:
        """Starts pycomm.all_reduce of `x`, in place, in the next lane."""
        lane = self._next()
        work: Work = collectives.all_reduce(
            x, op, algorithm=self._algorithm, group=lane, async_op=True
        )
        return work

    def all_gather(self, x: Any, out: Any) -> Work:
        """Starts pycomm.all_gather of `x` into `out` [size, *x.shape] in the next lane."""
        work: Work = collectives.all_gather(x, out, group=self._next(), async_op=True)
        return work

    def all_gather_v(self, x: Any, out: Any, counts: Sequence[int]) -> Work:
        """Starts an all_gather of lines whose elements by rank are `counts`, as all ranks know,
        into the line `out`, one after another, in the next lane."""
        return self._uneven("all_gather", x, out, counts)

    def all_to_all(self, x: Any, out: Any) -> Work:
        """Starts pycomm.all_to_all of `x` [size, *row] into `out` in the next lane."""
        work: Work = collectives.all_to_all(x, out, group=self._next(), async_op=True)
        return work

    def all_to_all_v(self, x: Any, out: Any, give: Sequence[int], take: Sequence[int]) -> Work:
        """Starts an all_to_all in the next lane: of the line `x`, `give[i]` elements go to rank i,
        in order; `take[i]` come from it, into the line `out`. The ranks have exchanged the counts,
        which the call does not compare again."""
        return self._uneven("all_to_all", x, out, [*give, *take])

    def _uneven(self, verb: str, x: Any, out: Any, counts: Sequence[int]) -> Work:
        source, target = arrays.view(x), arrays.view(out, write=True)
        call = (verb, source.dtype, "sum", source.pointer, target.pointer, 0, 0, 0, "auto")
        to_all = verb == "all_to_all"
        work: Work = calls.dispatch(
            self._next(), call, None, True, source, target, out, counts, to_all
        )
        return work

    def _next(self) -> Group:
        lane = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        return lane
