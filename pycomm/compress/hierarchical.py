"""The exchange "hierarchical": ranks of a host average their gradients, and hosts exchange packets.

    average    the dense gradients of a host's ranks, as they become ready
    select     the ranks of a host hold the same u and v and select the same elements
    exchange   the first rank of each host exchanges packets with the first ranks of other hosts
    broadcast  it sends the received packets to the ranks of its host

A host takes the role of a rank in the other exchanges. Its link transmits the bytes of one rank,
independent of the number of ranks on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pycomm import collectives
from pycomm._core_api.calls import Waitable, Work
from pycomm._training.communicators import CommunicatorPool
from pycomm.group import Group


def hosts_of(group: Group) -> list[int]:
    """The host of each rank; hosts are numbered from 0 in the order of their first ranks."""
    return list(group.core.hosts)


def spans_hosts(group: Group) -> bool:
    """Whether there are several hosts, and one of them has several ranks."""
    return 1 < max(hosts_of(group)) + 1 < group.size


def holder(hosts: Sequence[int], rank: int, size: int) -> tuple[int, int]:
    """The index of the holder of a residual, and the number of holders.

    Args:
        hosts: the host of each rank, if the ranks of a host share the residual; else [].
        rank, size: of the group.
    """
    return (hosts[rank], max(hosts) + 1) if hosts else (rank, size)


def saved_hosts(source: Mapping[str, Any]) -> list[int]:
    """The "hosts" of a rank's state, which older states lack."""
    found: list[int] = source.get("hosts", [])
    return found


def saved_holder(source: Mapping[str, Any]) -> tuple[int, int]:
    """The holder() of a rank's state."""
    return holder(saved_hosts(source), source["rank"], source["size"])


def rank_factor(hosts: Sequence[int], rank: int) -> float:
    """The residual of a rank over that of its host, N / (H L), with L of N ranks on this one of H
    hosts. So the mean over ranks equals the mean over hosts. 1 if `hosts` is []."""
    return len(hosts) / ((max(hosts) + 1) * hosts.count(hosts[rank])) if hosts else 1.0


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

    def all_gather(self, x: Any, out: Any) -> Waitable:
        """See CommunicatorPool."""
        return self._led(out, lambda pool: pool.all_gather(x, out))

    def all_gather_v(self, x: Any, out: Any, counts: Sequence[int]) -> Waitable:
        """See CommunicatorPool."""
        return self._led(out, lambda pool: pool.all_gather_v(x, out, counts))

    def all_to_all(self, x: Any, out: Any) -> Waitable:
        """See CommunicatorPool."""
        return self._led(out, lambda pool: pool.all_to_all(x, out))

    def all_to_all_v(
        self, x: Any, out: Any, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Waitable:
        """See CommunicatorPool."""
        return self._led(out, lambda pool: pool.all_to_all_v(x, out, send_counts, recv_counts))

    def abort(self, reason: str) -> None:
        """Aborts the subgroups after a failed step, so that no rank waits for this one. The other
        ranks of a host are not connected to a lost rank of another host and learn of it here."""
        self.broken = True
        for group in (self.inside, *([] if self._between is None else [self._between.group])):
            group.abort(reason)

    def _led(self, out: Any, call: Callable[[CommunicatorPool], Work]) -> Waitable:
        """Starts `call` on the first rank of each host; wait() broadcasts `out` inside the host."""
        started = None if self._between is None else call(self._between)
        return _LedWork(started, out, self.inside)


class _LedWork:
    """A transfer between hosts, then one inside this host."""

    def __init__(self, between: Waitable | None, out: Any, inside: Group) -> None:
        self._between, self._out, self._inside = between, out, inside

    def wait(self) -> None:
        if self._between is not None:
            self._between.wait()
        collectives.broadcast(self._out, 0, group=self._inside)

    def wait_for_device(self) -> None:
        if self._between is not None:
            self._between.wait_for_device()
        collectives.broadcast(self._out, 0, group=self._inside, async_op=True).wait_for_device()


class CurrentHostGroups:
    """The HostGroups of a group; new ones after a failure, or for another group.

    Attributes:
        value: the current ones, if there are any.
    """

    def __init__(self) -> None:
        self.value: HostGroups | None = None
        self._group: Group | None = None

    def get(self, group: Group) -> tuple[HostGroups, bool]:
        """Collective if they must be created. Also returns whether these replace broken ones of the
        same group, so that what the ranks of a host share may differ."""
        failed = self.value is not None and self.value.broken and self._group is group
        if self.value is None or failed or self._group is not group:
            self.value, self._group = HostGroups(group), group
        return self.value, failed

    def abort(self, reason: str) -> None:
        """Aborts the current ones after a failed step."""
        if self.value is not None:
            self.value.abort(reason)


def average_copies(hosts: HostGroups, tensors: Sequence[torch.Tensor], factor: float = 1.0) -> None:
    """Collective inside a host: replaces each tensor by the mean over its ranks times `factor`.
    Nothing changes if it fails."""
    means = [x.clone() for x in tensors]
    for work in [hosts.average(x) for x in means]:
        work.wait()
    for x, mean in zip(tensors, means, strict=True):
        x.copy_(mean.mul_(factor))
