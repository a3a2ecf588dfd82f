"""Communicators used in turn, so that a call need not wait for the previous one.

Each communicator is a group of the same ranks with its own thread and channels. Calls on different
communicators run concurrently. All ranks must make the calls in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycomm import _core, collectives
from pycomm._arguments import integer
from pycomm._core_api.calls import Work
from pycomm.default_group import chosen
from pycomm.group import Group

# Default number of communicators. On one host a single call uses the whole memory bandwidth.
BETWEEN_HOSTS = 2
MOST_LANES = 64


def tag_of(number: int, parameters: int = 0) -> int:
    """The tag of calls in the pass or step with this number, for parameters with this hash."""
    return (number & 0xFFFF) << 16 | parameters & 0xFFFF


class CommunicatorPool:
    """The group itself and, for `count` > 1, groups split off it. Collective to make.

    Args:
        group: the ranks; None: the default group.
        count: number of communicators; None: 1 if all ranks share a host, else 2.
        hierarchical: reduce within hosts, between hosts, then within hosts. Ignored on one host.
        split: False: without groups split off it until use() is called; not collective.

    Attributes:
        tag: what the arrays of the next calls are, by tag_of(); ranks compare it. 0: not known.

    Raises:
        InvalidArgument: `count` is not 1 to 64.
    """

    def __init__(
        self,
        group: Group | None = None,
        count: int | None = None,
        hierarchical: bool = False,
        split: bool = True,
    ) -> None:
        self._asked = count, hierarchical
        self.tag = 0
        self.use(chosen(group), split)

    def use(self, group: Group, split: bool = True) -> None:
        """Replaces all communicators by ones of the ranks of `group`. Collective."""
        count, hierarchical = self._asked
        self.group = group
        hosts = self.group.core.host_count
        if count is None:
            count = 1 if hosts == 1 else BETWEEN_HOSTS
        count = integer("lanes", count, 1, MOST_LANES)
        parts = (self.group.split(0) for _ in range(count - 1 if split else 0))
        self._groups = [self.group, *(part for part in parts if part is not None)]
        self._algorithm = "hierarchical" if hierarchical and hosts > 1 else None
        self._turn = 0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.group.rank

    @property
    def count(self) -> int:
        """The number of communicators."""
        return len(self._groups)

    def all_reduce(self, x: Any, op: str = "sum") -> Work:
        """Starts pycomm.all_reduce of `x`, in place, on the next communicator."""
        return self._start("all_reduce", x, x, op=op, algorithm=self._algorithm)

    def all_gather(self, x: Any, out: Any) -> Work:
        """Starts pycomm.all_gather of `x` into `out` [size, *x.shape] on the next communicator."""
        return self._start("all_gather", x, out)

    def all_gather_v(self, x: Any, out: Any, counts: Sequence[int]) -> Work:
        """Starts an all_gather with `counts[i]` elements of rank i on the next communicator.

        `x` and `out` are flat; `out` gets the ranks' elements in order. All ranks know `counts`.
        """
        return self._start("all_gather", x, out, counts=counts)

    def all_to_all(self, x: Any, out: Any) -> Work:
        """Starts pycomm.all_to_all of `x` [size, *row] into `out` on the next communicator."""
        work: Work = collectives.all_to_all(x, out, group=self._next(), async_op=True)
        return work

    def all_to_all_v(
        self, x: Any, out: Any, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Work:
        """Starts an all_to_all with different counts on the next communicator.

        `x` and `out` are flat: `send_counts[i]` elements of `x` are sent to rank i, in order, and
        `recv_counts[i]` elements from it are stored in `out`. The ranks have exchanged the counts,
        so the call does not compare them again.
        """
        counts = [*send_counts, *recv_counts]
        return self._start("all_to_all", x, out, counts=counts, counts_fit=True)

    def _start(self, verb: str, x: Any, out: Any, **options: Any) -> Work:
        call = _core.Call(verb, tag=self.tag, **options)
        work: Work = call(self._next(), x, out, out, True)
        return work

    def _next(self) -> Group:
        group = self._groups[self._turn]
        self._turn = (self._turn + 1) % len(self._groups)
        return group
