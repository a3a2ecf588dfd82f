"""The exchange "hierarchical": ranks of a host average their gradients, and hosts exchange packets.

    average    the dense gradients of a host's ranks, as they become ready
    select     the ranks of a host hold the same u and v and select the same elements
    exchange   the first rank of each host exchanges packets with the first ranks of other hosts
    broadcast  it sends the received packets to the ranks of its host

A host takes the role of a rank in the other exchanges. Its link transmits the bytes of one rank,
independent of the number of ranks on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycomm import collectives
from pycomm._core_api.calls import Work
from pycomm._training.communicators import CommunicatorPool
from pycomm.group import Group

__all__ = ["HostGroups", "hosts_of"]


def hosts_of(group: Group) -> list[int]:
    """The host of each rank; hosts are numbered from 0 in the order of their first ranks."""
    return list(group.core.hosts)


class HostGroups:
    """Communicators between hosts, with the methods of a CommunicatorPool.

    All ranks of a host make the same calls with the same packets. The constructor is collective.

    Attributes:
        of_rank: hosts_of() the group.
        rank, size: the host of this rank, and the number of hosts.
        share: factor of the mean over this host's ranks; with it the mean over hosts equals the
            mean over all ranks. 1 if all hosts have equally many ranks.
        inside: the subgroup of this host.
        broken: a call failed, so a new object is needed.
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
        """Whether this rank is the first of its host, which sends packets to other hosts."""
        return self._between is not None

    def average(self, x: torch.Tensor) -> Work:
        """Starts the mean over the ranks of this host, in place."""
        work: Work = collectives.all_reduce(x, "avg", group=self.inside, async_op=True)
        return work

    def agree(self, here: bool) -> bool:
        """Whether `here` is true on all ranks of this host."""
        word = torch.tensor([int(here)])
        collectives.all_reduce(word, "min", group=self.inside)
        return bool(word.item())

    def all_gather(self, x: Any, out: Any) -> Work:
        """See CommunicatorPool."""
        return self._led(out, lambda pool: pool.all_gather(x, out))

    def all_gather_v(self, x: Any, out: Any, counts: Sequence[int]) -> Work:
        """See CommunicatorPool."""
        return self._led(out, lambda pool: pool.all_gather_v(x, out, counts))

    def all_to_all(self, x: Any, out: Any) -> Work:
        """See CommunicatorPool."""
        return self._led(out, lambda pool: pool.all_to_all(x, out))

    def all_to_all_v(
        self, x: Any, out: Any, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Work:
        """See CommunicatorPool."""
        return self._led(out, lambda pool: pool.all_to_all_v(x, out, send_counts, recv_counts))

    def abort(self, reason: str) -> None:
        """Aborts the subgroups after a failed step, so that no rank waits for this one. The other
        ranks of a host are not connected to a lost rank of another host and learn of it here."""
        self.broken = True
        for group in (self.inside, *([] if self._between is None else [self._between.group])):
            group.abort(reason)

    def _led(self, out: Any, call: Callable[[CommunicatorPool], Work]) -> Work:
        """Runs `call` on the first rank of each host, then broadcasts `out` inside the host."""
        if self._between is not None:
            call(self._between).wait()
        work: Work = collectives.broadcast(out, 0, group=self.inside, async_op=True)
        return work
