"""Who is left of a group that broke, agreed on in the store in which its ranks met.

    come     each survivor says in the store that it is there
    watch    until every rank has come or is known to be gone
    claim    whoever sees that first says who goes on; what stands in the store holds for all
    form     those meet as a new group; if one is lost on the way, all of it again among them

Ranks are numbered as in the group that broke; after a forming that failed as in the one that did
not come to be, under whose name they go on. So a rank for which it did stand, and which then hears
that another was lost, meets the others there. Called by Group.shrink() alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from pycomm import _core
from pycomm.errors import Error, GroupBroken, PeerLost, Timeout

__all__ = ["Store", "regroup"]

Store: TypeAlias = "_core.Store | _core.PythonStore"

LEAST_S = 0.3  # for a healthy store to answer at the end of the limit
PAUSE_S = 0.01  # between two looks at the store
# For a rank that another takes for lost, and whose process cannot be asked, to say that it lives.
GRACE_S = 0.5
# For those who have come to meet as a group; twice as long each time that it was not enough.
FORM_S = 2.0
FULL_S = 1.0  # the store is read at least so often, though no rank said that it wrote to it
WORD = 32  # ranks that share a number in the store: a bit for each that has come


def regroup(core: _core.Group, store: Store, timeout_s: float) -> _core.Group:
    """Collective over the survivors: the group of them.

    Raises:
        GroupBroken: those who came are no majority, or the others went on without this rank.
        PeerLost: the store is gone, or two of the survivors cannot connect to each other.
        Timeout: they could not meet in `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    core.abort(f"rank {core.rank} calls shrink()")
    name, members, form_s = core.name, list(range(core.size)), FORM_S
    lost: Sequence[int] = core.lost()
    unreachable: int | None = None  # by this rank, in the forming that failed last
    unconnected: set[tuple[int, int]] = set()  # pairs of ranks in that forming
    with _processes(core) as processes, _store_is_there(core):
        while True:
            board = _SurvivorElection(store, name, members.index(core.rank), len(members), end)
            board.post_unreachable(unreachable)
            chosen = board.agree([processes[m] for m in members], lost)
            pairs = {(members[a], members[b]) for a, b in board.unconnected(chosen)}
            if both := pairs & unconnected:
                board.wait_until_read(len(chosen))
                raise _never_connected(core, *min(both))
            unconnected = pairs
            name, members, lost = _after(name), [members[i] for i in chosen], ()
            try:
                limit_s = max(0.1, min(form_s, end - time.monotonic()))
                return _core.regroup(core, store, name, members, limit_s)
            except (PeerLost, Timeout) as error:  # one was lost on the way: among those left
                unreachable = error.unreachable
                if time.monotonic() > end:
                    raise
                form_s *= 2


def _never_connected(core: _core.Group, first: int, second: int) -> PeerLost:
    one, other = (
        f"rank {rank} (host {core.members[rank].host}, pid {core.members[rank].pid})"
        for rank in (first, second)
    )
    return PeerLost(
        f'shrink: "{core.name}": {one} and {other} could not connect to each other in two '
        "attempts, though both reach the store: a firewall or a route between their hosts blocks "
        "TCP; or end one of the two processes and call shrink() again",
        op="shrink",
        rank=core.rank,
        peer=first if core.rank == second else second,
    )


def _after(name: str) -> str:
    """The name of the next group: "world~2" of "world~1"."""
    first, mark, number = name.rpartition("~")
    return f"{first}~{int(number) + 1}" if mark and number.isdigit() else f"{name}~1"


@contextlib.contextmanager
def _processes(core: _core.Group) -> Iterator[list[int | None]]:
    """By rank: a descriptor that is readable once its process has ended; -1: it has ended; None:
    it cannot be seen from here."""
    descriptors: list[int | None] = []
    try:
        for member in core.members:
            try:
                descriptors.append(_opened(member) if member.visible else None)
            except ProcessLookupError:  # it has ended
                descriptors.append(-1)
            except OSError:  # a kernel or a sandbox without it
                descriptors.append(None)
        yield descriptors
    finally:
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)


def _opened(member: _core.Member) -> int:
    """A descriptor of the member's process; -1 where its process id is another process's by now."""
    descriptor = os.pidfd_open(member.pid)
    if member.started and _started(member.pid) not in (0, member.started):
        os.close(descriptor)
        return -1
    return descriptor


def _started(pid: int) -> int:
    """When a process began, as Member.started; 0 where that cannot be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # it has ended, or /proc hides it
        return 0
    return int(stat.rpartition(b")")[2].split()[19])


def _has_ended(descriptor: int | None) -> bool:
    if descriptor is None or descriptor < 0:
        return descriptor is not None
    return bool(select.select([descriptor], [], [], 0)[0])


@contextlib.contextmanager
def _store_is_there(core: _core.Group) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's stores raise their own
        if isinstance(error, Error) and (error.op or not isinstance(error, PeerLost)):
            raise
        raise PeerLost(
            "shrink: the store in which the ranks met is gone, as with the rank or the host that "
            f"served it: start the run again ({error})",
            op="shrink",
            rank=core.rank,
        ) from error


class _SurvivorElection:
    """What the `size` ranks of one group leave in the store to agree on who goes on, until `end`
    by the steady clock."""

    def __init__(self, store: Store, name: str, rank: int, size: int, end: float) -> None:
        self._store, self._rank, self._size, self._end = store, rank, size, end
        self._prefix, self._name = f"{name}/shrink/", name
        self._dead: set[int] = set()  # for certain
        self._lost: set[int] = set()  # as a survivor says
        self._came: set[int] = set()
        self._marks = self._losses = -1  # the store's counters, as they were read last

    def agree(self, processes: Sequence[int | None], lost: Sequence[int]) -> list[int]:
        """Collective. Those who go on, the same on all of them; this rank among them."""
        for rank in lost:
            self._mark("lost", rank)
        self._mark("came", self._rank // WORD, 1 << self._rank % WORD)
        begin, next_full = time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            marks = self._add("marks", 0, 0)
            if marks != self._marks or now >= next_full:
                if (decided := self._decided()) is not None:
                    break
                self._read_board()
                self._marks, next_full = marks, now + FULL_S
            here = self._here(processes)
            given_up = self._dead | (self._lost if now - begin >= GRACE_S else set())
            if now >= self._end or len(here | given_up) == self._size:
                decided = self._claim(here)
                self._add("marks", 0, 1)
                break
            time.sleep(PAUSE_S)  # polls: a store sends no notifications
        if not decided:
            raise self._error(
                f"of {self._size} ranks too few are left to go on: the others may still live, and "
                "a part of a group goes on only as its majority"
            )
        if self._rank not in decided:
            raise self._error(
                f"the others of {self._size} ranks went on without this one, which came too late "
                "or was taken for lost"
            )
        return decided

    def _here(self, processes: Sequence[int | None]) -> set[int]:
        """Who has come and lives; tells the others which processes have ended."""
        for rank in set(range(self._size)) - self._dead:
            if _has_ended(processes[rank]):
                self._mark("dead", rank)
                self._dead.add(rank)
        return self._came - self._dead

    def _read_board(self) -> None:
        """Reads who has come and, where that changed, who is dead or lost."""
        losses = self._add("losses", 0, 0)
        words = [self._add("came", i, 0) for i in range((self._size + WORD - 1) // WORD)]
        self._came = {r for r in range(self._size) if words[r // WORD] >> r % WORD & 1}
        if losses == self._losses:
            return
        self._losses = losses
        for rank in set(range(self._size)) - self._dead - self._came:
            if self._add("dead", rank, 0):
                self._dead.add(rank)
            elif self._add("lost", rank, 0):
                self._lost.add(rank)

    def _mark(self, kind: str, number: int, amount: int = 1) -> None:
        """Writes to the board, then to the counters that tell the others to read it."""
        self._add(kind, number, amount)
        if kind != "came":
            self._add("losses", 0, 1)
        self._add("marks", 0, 1)

    def post_unreachable(self, peer: int | None) -> None:
        """Tells the others that this rank could not connect to `peer` in the last forming."""
        if peer is not None:
            text = str(peer).encode()
            self._store.set(f"{self._prefix}unreachable/{self._rank}", text, self._left_s())
            self._add("unconnected", 0, 1)

    def unconnected(self, chosen: Sequence[int]) -> set[tuple[int, int]]:
        """The pairs among those who go on that could not connect in the last forming."""
        pairs: set[tuple[int, int]] = set()
        if not self._add("unconnected", 0, 0):
            return pairs
        for rank in chosen:
            try:
                text = self._store.get(f"{self._prefix}unreachable/{rank}", 0.0)
            except Timeout:  # it could connect to all
                continue
            peer = int(text) if re.fullmatch(rb"[0-9]{1,9}", text) else rank
            if peer in chosen and peer != rank:
                pairs.add((min(rank, peer), max(rank, peer)))
        return pairs

    def wait_until_read(self, count: int) -> None:
        """Returns when `count` ranks have called it, at the latest after some moments: the process
        that serves the store does not end before the others know why the shrink failed."""
        end = time.monotonic() + GRACE_S
        with contextlib.suppress(RuntimeError):  # that process has ended: this rank has read all
            read = self._add("read", 0, 1)
            while read < count and time.monotonic() < end:
                time.sleep(PAUSE_S)  # polls: a store sends no notifications
                read = self._add("read", 0, 0)

    def _claim(self, here: set[int]) -> list[int]:
        """Lets those who are here go on if they are enough, unless somebody else has decided."""
        alive = sorted(set(range(self._size)) - self._dead)
        half = 2 * len(here) == len(alive) and alive[0] in here
        enough = 2 * len(here) > len(alive) or half
        text = " ".join(map(str, sorted(here))) if enough else "none"
        return self._parsed(
            self._store.claim(self._prefix + "decided", text.encode(), self._left_s())
        )

    def _decided(self) -> list[int] | None:
        try:
            text = self._store.get(self._prefix + "decided", 0.0)
        except Timeout:  # nobody has decided yet
            return None
        return self._parsed(text)

    def _parsed(self, text: bytes) -> list[int]:
        """The ranks that a decision names; raises GroupBroken for bytes that are none."""
        if text == b"none":
            return []
        words = text.split(b" ") if re.fullmatch(rb"[0-9]{1,9}( [0-9]{1,9})*", text) else []
        ranks = [int(word) for word in words]
        if not ranks or ranks != sorted({rank for rank in ranks if rank < self._size}):
            raise self._error(
                f"the store names as those who go on {text[:60]!r}, which is no ascending list of "
                f"ranks below {self._size}: another program, or another version of pycomm, wrote it"
            )
        return ranks

    def _add(self, kind: str, number: int, amount: int) -> int:
        return self._store.add(f"{self._prefix}{kind}/{number}", amount, self._left_s())

    def _left_s(self) -> float:
        """The limit of a call of the store."""
        return max(LEAST_S, self._end - time.monotonic())

    def _error(self, text: str) -> GroupBroken:
        return GroupBroken(f'shrink: "{self._name}": {text}', op="shrink", rank=self._rank)
