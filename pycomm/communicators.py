"""Communicators used in turn, so that the next call need not wait for the one before.

Each communicator is a group of the same ranks with its own thread and channels. Calls on different
communicators run at the same time. Not a scheduler: who calls does so in the same order on every
rank. Called by the training layer (compress, parallel).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycomm import arrays, calls, collectives
from pycomm.calls import Work
from pycomm.errors import InvalidArgument
from pycomm.group import Group, default

__all__ = ["CommunicatorPool"]

# Communicators by default. Within a host one call already uses all of the memory bandwidth.
BETWEEN_HOSTS = 2


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
        self._groups = [self.group, *(part for part in parts if part is not None)]
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
        """How many communicators there are."""
        return len(self._groups)

    def all_reduce(self, x: Any, op: str = "sum") -> Work:
        """Starts pycomm.all_reduce of `x`, in place, on the next communicator."""
        group = self._next()
        work: Work = collectives.all_reduce(
            x, op, algorithm=self._algorithm, group=group, async_op=True
        )
        return work

    def all_gather(self, x: Any, out: Any) -> Work:
        """Starts pycomm.all_gather of `x` into `out` [size, *x.shape] on the next communicator."""
        work: Work = collectives.all_gather(x, out, group=self._next(), async_op=True)
        return work

    def all_gather_v(self, x: Any, out: Any, counts: Sequence[int]) -> Work:
        """Starts an all_gather of lines whose elements by rank are `counts`, as all ranks know,
        into the line `out`, one after another, on the next communicator."""
        return self._uneven("all_gather", x, out, counts)

    def all_to_all(self, x: Any, out: Any) -> Work:
        """Starts pycomm.all_to_all of `x` [size, *row] into `out` on the next communicator."""
        work: Work = collectives.all_to_all(x, out, group=self._next(), async_op=True)
        return work

    def all_to_all_v(self, x: Any, out: Any, give: Sequence[int], take: Sequence[int]) -> Work:
        """Starts an all_to_all on the next communicator: of the line `x`, `give[i]` elements go to
        rank i, in order; `take[i]` come from it, into the line `out`. The ranks have exchanged the
        counts, which the call does not compare again."""
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
        group = self._groups[self._turn]
        self._turn = (self._turn + 1) % len(self._groups)
        return group
