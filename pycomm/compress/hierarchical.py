"""The exchange "hierarchical": ranks of a host sum their gradients, and hosts exchange packets.

    sum       the gradients of a host's ranks, dense, as they become ready
    select    u and v are the host's: its ranks hold the same bits and take out the same elements
    between   the first rank of each host exchanges packets with those of the others,
    inside    and hands on what has arrived to the ranks of its own

So a host is to packets what a rank is in the other exchanges, and the line of a host carries one
rank's bytes, however many it has. Called by transaction.py; dgc.py makes Hosts, state.py converts u
and v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycomm import collectives
from pycomm.calls import Work
from pycomm.communicators import CommunicatorPool
from pycomm.group import Group

__all__ = ["Hosts", "hosts_of"]


def hosts_of(group: Group) -> list[int]:
    """By rank: which host, numbered from 0 in the order of their first ranks."""
    return list(group._core.hosts)


class Hosts:
    """The hosts of a group, each as if it were one rank: packets use them like a CommunicatorPool.
    All ranks of a host make the same calls with the same packets. Collective to make.

    Attributes:
        of_rank: hosts_of() the group.
        rank, size: this rank's host, and how many there are.
        share: what the mean over the ranks of this host is multiplied by, so that the mean over
            hosts is that over all ranks: 1 where hosts have as many ranks each.
        inside: the ranks of this host.
        broken: a call has failed: another one must be made.
    """

    def __init__(self, group: Group) -> None:
        self.of_rank = hosts_of(group)
        self.rank = self.of_rank[group.rank]
        self.size = max(self.of_rank) + 1
        self.share = self.size * self.of_rank.count(self.rank) / group.size
        inside = group.split(self.rank)
        assert inside is not None  # every rank is on a host
        self.inside = inside
        between = group.split(0 if inside.rank == 0 else None)
        self._between = None if between is None else CommunicatorPool(between, 1)
        self.broken = False

    @property
    def leads(self) -> bool:
        """Whether this rank is the one of its host whose packets travel."""
        return self._between is not None

    def average(self, x: torch.Tensor) -> Work:
        """Starts the mean over the ranks of this host, in place."""
        work: Work = collectives.all_reduce(x, "avg", group=self.inside, async_op=True)
        return work

    def agree(self, here: bool) -> bool:
        """Whether it is so on all ranks of this host."""
        word = torch.tensor([int(here)])
        collectives.all_reduce(word, "min", group=self.inside)
        return bool(word.item())

    def all_gather(self, x: Any, out: Any) -> Work:
        """As of CommunicatorPool; so are the others."""
        return self._led(out, lambda pool: pool.all_gather(x, out))

    def all_gather_v(self, x: Any, out: Any, counts: Sequence[int]) -> Work:
        """See CommunicatorPool."""
        return self._led(out, lambda pool: pool.all_gather_v(x, out, counts))

    def all_to_all(self, x: Any, out: Any) -> Work:
        """See CommunicatorPool."""
        return self._led(out, lambda pool: pool.all_to_all(x, out))

    def all_to_all_v(self, x: Any, out: Any, give: Sequence[int], take: Sequence[int]) -> Work:
        """See CommunicatorPool."""
        return self._led(out, lambda pool: pool.all_to_all_v(x, out, give, take))

    def give_up(self, reason: str) -> None:
        """A step has failed here: nobody shall wait for this rank. Those of its host are not
        connected to who was lost on another, so they hear of it by this."""
        self.broken = True
        for group in (self.inside, *([] if self._between is None else [self._between.group])):
            group.abort(reason)

    def _led(self, out: Any, call: Callable[[CommunicatorPool], Work]) -> Work:
        """Between hosts by the first rank of each, then inside."""
        if self._between is not None:
            call(self._between).wait()
        work: Work = collectives.broadcast(out, 0, group=self.inside, async_op=True)
        return work
