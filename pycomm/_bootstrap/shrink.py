"""Carries out shrink() and replace(): the votes in the rendezvous store, and forming the group.

protocol.py decides. Keys in the store, under <name>/shrink/:

    came/<word>           bit mask of 32 ranks that called shrink()
    dead/<word>           by rank, how many saw its process end, or that it did not join: joining.py
    lost/<word>           by rank, how many report it as lost
    marks/0, losses/0     counters of changes to the three above; to `dead` and `lost`
    unreachable/<rank>    a peer to which the rank could not connect
    unconnected/0         number of ranks that wrote one
    read/0                number of ranks that read why shrink() failed
    decided               the surviving ranks, or "none"; the first write is final

The counts of `dead` and `lost` are parts of one number for several ranks: report_place().
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import select
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pycomm import _core
from pycomm._bootstrap import events
from pycomm._bootstrap.driver import LEAST_S, PAUSE_S, Driver
from pycomm._bootstrap.elastic_store import Elastic, successors
from pycomm._bootstrap.events import Decision
from pycomm._bootstrap.joining import Joiners, invite, process_start, report_place, reported
from pycomm._bootstrap.protocol import Shrinking
from pycomm.errors import Error, GroupBroken, PeerLost, Timeout

# For a rank that another reports as lost, and whose process is not visible, to join.
GRACE_S = 0.5
# For the survivors to form a group; doubled after each failure.
FORM_S = 2.0
FULL_S = 1.0  # longest interval between full reads of the store
WORD = 32  # ranks per number in the store: a bit for each rank that joined


def regroup(
    core: _core.Group,
    store: _core.Store,
    timeout_s: float,
    elastic: Elastic | None = None,
    joiners: Joiners | None = None,
) -> tuple[_core.Group, Elastic | None]:
    """Forms the group of the survivors and of processes that join them. Collective over them.

    Args:
        elastic: of an elastic group.
        joiners: chooses the processes that join; None: none.

    Returns:
        The group; and of an elastic group what it passes on.

    Raises:
        GroupBroken: the survivors are no majority, or the others continued without this rank.
        PeerLost: the store ended, or this rank and another survivor cannot connect.
        Timeout: they could not meet in `timeout_s` seconds.
    """
    end = time.monotonic() + timeout_s
    core.abort(f"rank {core.rank} calls {'replace' if joiners else 'shrink'}()")
    with processes_of(core) as processes, _report_lost_store(core):
        driver = _ShrinkDriver(core, store, processes, end, elastic, joiners)
        return driver.run(), driver.elastic


class VoteDriver(Driver):
    """What shrink() and grow() have in common: the vote, and forming the group.

    Args:
        processes: as of processes_of().
        end: the limit of the call, by the steady clock.
        elastic: of an elastic group: what it passes on.
        joiners: reads the requests of processes that join; None: none do.
    """

    outcome = ""  # as of joining.Answer

    def __init__(
        self,
        core: _core.Group,
        store: Any,
        processes: Sequence[int | None],
        end: float,
        elastic: Elastic | None,
        joiners: Joiners | None,
    ) -> None:
        self.core, self.store, self.end, self.elastic = core, store, end, elastic
        self._processes, self._joiners = processes, joiners
        self._before, self._follow = elastic, events.Follow((), {})

    @property
    def ballot_name(self) -> str:
        """Under which the ranks vote."""
        name: str = self.state.name
        return name

    @property
    def members(self) -> Sequence[int]:
        """By rank of the group that votes: the rank in `core`; -1: the process was to join."""
        raise NotImplementedError

    @property
    def left_s(self) -> float:
        """The time limit of a store call."""
        return max(LEAST_S, self.end - time.monotonic())

    @property
    def ended(self) -> frozenset[int]:
        """The ranks whose processes ended."""
        return frozenset(
            rank
            for rank, member in enumerate(self.members)
            if member >= 0 and has_ended(self._processes[member])
        )

    def do_begin(self, _: events.Action) -> events.Began:
        rank, size = self.members.index(self.core.rank), len(self.members)
        self.ballot = Ballot(self.store, self.ballot_name, rank, size, self.end)
        return events.Began(self.ended)

    def do_report(self, action: events.Report) -> None:
        self.ballot.report(action.kind, action.ranks)

    def do_vote(self, _: events.Action) -> None:
        self.ballot.vote()

    def do_watch(self, _: events.Action) -> events.Seen:
        seen = self.ballot.watch()
        ended, followers = self.ended, None
        if self.elastic is not None:  # after `ended`: a rank writes the file before it ends
            followers = successors(self.elastic, self.members.index(self.core.rank))
        return dataclasses.replace(seen, ended=ended, successors=followers)

    def do_ask(self, _: events.Action) -> events.Asked:
        return self._joiners.asked(self.store, self.left_s) if self._joiners else events.Asked()

    def do_claim(self, action: events.Claim) -> events.Decided:
        decision = self.ballot.claim(action.decision)
        return events.Decided(decision, self.ended, time.monotonic() >= self.end)

    def do_follow(self, action: events.Follow) -> None:
        self._before, self._follow = self.elastic, action
        if self.elastic is not None:  # what applies if the group does not form
            self.elastic = self.elastic.after(action.slots, dict.fromkeys(action.joined))

    def do_form(self, action: events.Form) -> events.Formed | events.NotFormed:
        limit_s = max(0.1, min(FORM_S * 2**action.attempt, self.end - time.monotonic()))
        ranks = list(action.ranks)
        try:
            if self._before is not None:
                self.elastic = invite(
                    self.store,
                    self._before,
                    action.name,
                    ranks,
                    self._follow.slots,
                    self._follow.joined,
                    limit_s,
                    self.outcome,
                )
            self.made = _core.regroup(
                self.core, self.store, action.name, action.rank, ranks, limit_s
            )
        except (PeerLost, Timeout) as error:  # a rank was lost meanwhile
            self.error = error
            late = time.monotonic() > self.end
            return events.NotFormed(str(error), error.unreachable, late)
        before, rank = self._before, self.state.election.rank
        return events.Formed(successors(before, rank) if before is not None else None)


class _ShrinkDriver(VoteDriver):
    state: Shrinking

    def __init__(self, core: _core.Group, *given: Any) -> None:
        super().__init__(core, *given)
        *_, joiners = given
        self.state = Shrinking(
            core.rank,
            core.name,
            tuple(core.ranks),
            tuple(range(core.size)),
            frozenset(core.lost()),
            joiners is not None,
        )

    @property
    def members(self) -> Sequence[int]:
        return self.state.members

    def do_repeat(self, action: events.Repeat) -> None:
        key = f"{action.name}/shrink/decided"
        self.store.claim(key, action.decision.text(), self.left_s)

    def do_postunreachable(self, action: events.PostUnreachable) -> None:
        self.ballot.post_unreachable(action.peer)

    def do_compare(self, action: events.Compare) -> events.Compared:
        return events.Compared(self.ballot.unconnected(action.survivors), self.ended)

    def do_awaitreaders(self, action: events.AwaitReaders) -> None:
        self.ballot.wait_until_read(action.count)

    def do_fail(self, action: events.Fail) -> None:
        if self.made is not None:
            self.made.abort(action.text)
        self.failure = self.error
        if action.pair is not None:
            self.failure = _never_connected(self.core, *action.pair)
        elif action.kind is not None:
            text = f'shrink: "{self.state.name}": {action.text}'
            self.failure = action.kind(text, op="shrink", rank=self.state.election.rank)


def _never_connected(core: _core.Group, first: int, second: int) -> PeerLost:
    one, other = (
        f"rank {rank} (host {core.members[rank].host}, pid {core.members[rank].pid})"
        for rank in (first, second)
    )
    return PeerLost(
        f'shrink: "{core.name}": {one} and {other} could not connect to each other in two '
        "attempts, but both reach the store: this rank is in no group that continues; check "
        "firewalls and routes between their hosts for TCP",
        op="shrink",
        rank=core.rank,
        peer=first if core.rank == second else second,
    )


@contextlib.contextmanager
def processes_of(core: _core.Group) -> Iterator[list[int | None]]:
    """By rank: a pidfd, readable after the process ended; -1: it ended; None: it is not visible."""
    descriptors: list[int | None] = []
    try:
        for member in core.members:
            try:
                descriptors.append(_opened(member) if member.visible else None)
            except ProcessLookupError:  # it has ended
                descriptors.append(-1)
            except OSError:  # a kernel or sandbox without pidfd
                descriptors.append(None)
        yield descriptors
    finally:
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)


def _opened(member: _core.Member) -> int:
    """A pidfd of the member's process; -1 if another process has its process id now."""
    descriptor = os.pidfd_open(member.pid)
    if member.started and process_start(member.pid) not in (0, member.started):
        os.close(descriptor)
        return -1
    return descriptor


def has_ended(descriptor: int | None) -> bool:
    if descriptor is None or descriptor < 0:
        return descriptor is not None
    return bool(select.select([descriptor], [], [], 0)[0])


@contextlib.contextmanager
def _report_lost_store(core: _core.Group) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's stores raise errors of their own
        if isinstance(error, Error) and (error.op or not isinstance(error, PeerLost)):
            raise
        raise PeerLost(
            "shrink: the rendezvous store ended, probably with the rank or host that served it: "
            f"start the run again ({error})",
            op="shrink",
            rank=core.rank,
        ) from error


class Ballot:
    """The vote of the `size` ranks of one group about the survivors, in the store, until `end` by
    the steady clock."""

    def __init__(self, store: _core.Store, name: str, rank: int, size: int, end: float) -> None:
        self._store, self._rank, self._size, self._end = store, rank, size, end
        self._prefix, self._name = f"{name}/shrink/", name
        self._begin, self._next_full = time.monotonic(), 0.0
        self._came: set[int] = set()
        self._reported: dict[str, set[int]] = {"dead": set(), "lost": set()}
        self._marks = self._losses = -1  # the store's counters as of the last read
        self._voted = -1  # marks/0 after the vote; -1: not yet, or read since

    def report(self, kind: str, ranks: frozenset[int]) -> None:
        """Counts the ranks as `kind`, for others that read the store after the next mark."""
        amounts: Counter[int] = Counter()
        for rank in ranks:
            number, amount = report_place(rank, self._size)
            amounts[number] += amount
        for number, amount in amounts.items():
            self._add(kind, number, amount)
        if amounts:
            self._add("losses", 0, 1)
        if amounts and self._marks >= 0:  # else vote() follows
            self._add("marks", 0, 1)

    def vote(self) -> None:
        """Writes that this rank is present."""
        self._add("came", self._rank // WORD, 1 << self._rank % WORD)
        self._voted = self._add("marks", 0, 1)

    def watch(self) -> events.Seen:
        """What the store says: at once after the vote, else after a short wait for a decision."""
        decision, marks, self._voted = None, self._voted, -1
        if marks < 0:
            decision = self._decided(PAUSE_S)
            marks = self._marks if decision else self._add("marks", 0, 0)
        now = time.monotonic()
        if not decision and (marks != self._marks or now >= self._next_full):
            self._read_store()
            self._marks, self._next_full = marks, now + FULL_S
        dead, lost = map(frozenset, self._reported.values())
        grace, late = now - self._begin >= GRACE_S, now >= self._end
        return events.Seen(
            frozenset(self._came), dead, lost, grace=grace, late=late, decision=decision
        )

    def claim(self, decision: Decision) -> Decision:
        """Decides, unless there is a decision."""
        text = self._store.claim(f"{self._prefix}decided", decision.text(), self._left_s())
        return self._parsed(text)

    def _read_store(self) -> None:
        """Reads which ranks joined and, if that changed, which are dead or lost."""
        losses = self._add("losses", 0, 0)
        words = [self._add("came", i, 0) for i in range((self._size + WORD - 1) // WORD)]
        self._came = {r for r in range(self._size) if words[r // WORD] >> r % WORD & 1}
        if losses == self._losses:
            return
        self._losses = losses
        for kind, known in self._reported.items():
            missing = set(range(self._size)) - self._reported["dead"] - self._came
            numbers = sorted({report_place(rank, self._size)[0] for rank in missing})
            sums = {number: self._add(kind, number, 0) for number in numbers}
            known.update(reported(sums, self._size) & missing)

    def post_unreachable(self, peer: int) -> None:
        """Reports that this rank could not connect to `peer` in the last forming."""
        text = str(peer).encode()
        self._store.set(f"{self._prefix}unreachable/{self._rank}", text, self._left_s())
        self._add("unconnected", 0, 1)

    def unconnected(self, chosen: frozenset[int]) -> frozenset[tuple[int, int]]:
        """The pairs of survivors that could not connect in the last forming."""
        pairs: set[tuple[int, int]] = set()
        if not self._add("unconnected", 0, 0):
            return frozenset()
        for rank in sorted(chosen):
            try:
                text = self._store.get(f"{self._prefix}unreachable/{rank}", 0.0)
            except Timeout:  # it connected to all
                continue
            peer = int(text) if re.fullmatch(rb"[0-9]{1,9}", text) else rank
            if peer in chosen and peer != rank:
                pairs.add((min(rank, peer), max(rank, peer)))
        return frozenset(pairs)

    def wait_until_read(self, count: int) -> None:
        """Returns when `count` ranks have called it, or after a short time: the process that serves
        the store must not end before the others know why the shrink failed.
        """
        end = time.monotonic() + GRACE_S
        with contextlib.suppress(RuntimeError):  # that process ended: this rank has read all
            read = self._add("read", 0, 1)
            while read < count and time.monotonic() < end:
                time.sleep(PAUSE_S)  # polls: a store sends no notifications
                read = self._add("read", 0, 0)

    def _decided(self, wait_s: float) -> Decision | None:
        """The decision, which another rank wrote or writes within `wait_s`."""
        try:
            text = self._store.get(self._prefix + "decided", wait_s)
        except Timeout:  # no decision yet
            return None
        return self._parsed(text)

    def _parsed(self, text: bytes) -> Decision:
        """The decision in these bytes; raises GroupBroken for invalid bytes."""
        if (decision := Decision.of(text, self._size)) is not None:
            return decision
        raise GroupBroken(
            f'shrink: "{self._name}": invalid decision in the store: got {text[:60]!r}, expected '
            f"ascending ranks below {self._size}: another program or version of pycomm wrote it",
            op="shrink",
            rank=self._rank,
        )

    def _add(self, kind: str, number: int, amount: int) -> int:
        return self._store.add(f"{self._prefix}{kind}/{number}", amount, self._left_s())

    def _left_s(self) -> float:
        """The time limit of a store call."""
        return max(LEAST_S, self._end - time.monotonic())
