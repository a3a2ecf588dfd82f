"""Shrinks a broken group to its survivors, who agree through the rendezvous store.

    join     each survivor writes to the store that it is present
    watch    until every rank joined or is known to be dead
    decide   the first rank to see that writes the list of survivors, which is final
    form     the survivors form a new group; if one is lost meanwhile, they start again

Ranks are numbered as in the broken group; after a failed forming, as in the group that failed to
form, whose name is used. So a rank that formed the new group and then loses a peer meets the others
in the next attempt.

Keys in the store, under <name>/shrink/:

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

from pycomm import _core
from pycomm._bootstrap.elastic_store import Elastic, StoreMoved
from pycomm._bootstrap.joining import Joiners, invite, process_start, report_place, reported
from pycomm.errors import Error, GroupBroken, PeerLost, Timeout

LEAST_S = 0.3  # what the store gets to answer in, even at the end of the limit
PAUSE_S = 0.01  # between two polls of the store, for changes other than the awaited one
# For a rank that another reports as lost, and whose process is not visible, to join.
GRACE_S = 0.5
# For the survivors to form a group; doubled after each failure.
FORM_S = 2.0
FULL_S = 1.0  # longest interval between full reads of the store
# The survivors, then the ranks and requests of the processes that join: Decision.text().
DECISION = re.compile(
    rb"([0-9]{1,9}(?: [0-9]{1,9})*)(?:\+([0-9]{1,9}=[0-9]{1,9}(?: [0-9]{1,9}=[0-9]{1,9})*))?"
)
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
        PeerLost: the store ended, or two of the survivors cannot connect to each other.
        Timeout: they could not meet in `timeout_s` seconds.
    """
    end = time.monotonic() + timeout_s
    core.abort(f"rank {core.rank} calls {'replace' if joiners else 'shrink'}()")
    with processes_of(core) as processes, _report_lost_store(core):
        regrouping = _Regrouping(core, store, processes, end)
        if elastic is not None:
            regrouping.elastic = elastic
        regrouping.joiners = joiners
        return regrouping.run(), regrouping.elastic


class _Regrouping:
    """Elections and attempts to form the chosen group, until one succeeds.

    Attributes:
        elastic: of the group that failed last, or was formed.
        joiners: as of regroup().
    """

    elastic: Elastic | None = None
    joiners: Joiners | None = None

    def __init__(
        self, core: _core.Group, store: _core.Store, processes: Sequence[int | None], end: float
    ) -> None:
        self._core, self._store, self._processes, self._end = core, store, processes, end
        self._name, self._ranks = core.name, list(core.ranks)
        # By rank of the group that failed last: the rank in `core`; -1: the process was to join.
        self._members = list(range(core.size))
        self._lost: Sequence[int] = core.lost()
        # The peer that this rank could not connect to in the last forming.
        self._unreachable: int | None = None
        self._unconnected: set[tuple[int, int]] = set()  # pairs of ranks in the last forming
        self._decisions: dict[str, bytes] = {}  # by group name

    def run(self) -> _core.Group:
        """The new group."""
        form_s = FORM_S
        while True:
            try:
                decision = self._elect()
            except StoreMoved:  # again in the store of the next rank
                continue
            try:
                return self._form(decision, form_s)
            except (PeerLost, Timeout) as error:  # a rank was lost meanwhile: again among the rest
                self._unreachable = error.unreachable
                if time.monotonic() > self._end:
                    raise
                form_s *= 2

    def _elect(self) -> Decision:
        """Agrees on the survivors of the group that failed last, and on who joins them."""
        left_s = max(LEAST_S, self._end - time.monotonic())
        for name, text in self._decisions.items():  # another rank's store does not have them
            self._store.claim(f"{name}/shrink/decided", text, left_s)
        members = self._members
        election = SurvivorElection(
            self._store, self._name, members.index(self._core.rank), len(members), self._end
        )
        election.joiners, election.free = self.joiners, dict(enumerate(self._ranks))
        election.absent = {rank for rank, member in enumerate(members) if member < 0}
        election.post_unreachable(self._unreachable)
        decision = election.agree(
            [self._processes[m] if m >= 0 else None for m in members],
            [*self._lost, *election.absent],
        )
        self._decisions[self._name] = decision.text()
        pairs = {
            (members[a], members[b])
            for a, b in election.unconnected(decision.survivors)
            if members[a] >= 0 and members[b] >= 0
        }
        if both := pairs & self._unconnected:
            election.wait_until_read(len(decision.survivors))
            raise _never_connected(self._core, *min(both))
        self._unconnected = pairs
        return decision

    def _form(self, decision: Decision, form_s: float) -> _core.Group:
        """One attempt. Raises PeerLost or Timeout if a rank was lost meanwhile."""
        chosen = set(decision.survivors)
        slots = sorted([*chosen, *decision.joined])
        ended = [s for s in chosen if self._members[s] >= 0 and self._has_ended(self._members[s])]
        self._name = _after(self._name)
        self._members = [self._members[s] if s in chosen else -1 for s in slots]
        self._ranks, self._lost = [self._ranks[s] for s in slots], ()
        limit_s = max(0.1, min(form_s, self._end - time.monotonic()))
        before = self.elastic
        if before is not None:  # what applies if this attempt fails
            self.elastic = before.after(slots, dict.fromkeys(decision.joined))
        if ended:  # before the processes that join get an answer
            raise PeerLost(f"shrink: rank {ended[0]} ended after it was chosen", op="shrink")
        if before is not None:
            self.elastic = invite(
                self._store, before, self._name, self._ranks, slots, decision.joined, limit_s
            )
        rank = self._members.index(self._core.rank)
        return _core.regroup(self._core, self._store, self._name, rank, self._ranks, limit_s)

    def _has_ended(self, member: int) -> bool:
        return has_ended(self._processes[member])


def _never_connected(core: _core.Group, first: int, second: int) -> PeerLost:
    one, other = (
        f"rank {rank} (host {core.members[rank].host}, pid {core.members[rank].pid})"
        for rank in (first, second)
    )
    return PeerLost(
        f'shrink: "{core.name}": {one} and {other} could not connect to each other in two '
        "attempts, but both reach the store: check firewalls and routes between their hosts for "
        "TCP, or end one of the two processes and call shrink() again",
        op="shrink",
        rank=core.rank,
        peer=first if core.rank == second else second,
    )


def _after(name: str) -> str:
    """The name of the next group: "world~1" becomes "world~2"."""
    first, mark, number = name.rpartition("~")
    return f"{first}~{int(number) + 1}" if mark and number.isdigit() else f"{name}~1"


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


@dataclasses.dataclass(frozen=True)
class Decision:
    """The surviving ranks, in ascending order, and the number of the request of the process that
    joins, by rank.
    """

    survivors: list[int]
    joined: dict[int, int] = dataclasses.field(default_factory=dict)

    def text(self) -> bytes:
        """For the store: "0 2 3" or "0 2 3+1=7", where request 7 gets rank 1."""
        joined = " ".join(f"{rank}={n}" for rank, n in sorted(self.joined.items()))
        return (" ".join(map(str, self.survivors)) + (f"+{joined}" if joined else "")).encode()


class SurvivorElection:
    """The agreement of the `size` ranks of one group on the survivors, in the store, until `end` by
    the steady clock.

    Attributes:
        joiners: chooses processes that join; None: none do.
        free: by slot of the next group: its rank in Group.ranks; ranks of this one that live are
            not free.
        absent: ranks whose processes were to join and that have no vote unless they come.
    """

    joiners: Joiners | None = None
    free: Mapping[int, int] = MappingProxyType({})
    absent: AbstractSet[int] = frozenset()

    def __init__(self, store: _core.Store, name: str, rank: int, size: int, end: float) -> None:
        self._store, self._rank, self._size, self._end = store, rank, size, end
        self._prefix, self._name = f"{name}/shrink/", name
        self._dead: set[int] = set()  # certainly
        self._lost: set[int] = set()  # reported by a survivor
        self._came: set[int] = set()
        self._marks = self._losses = -1  # the store's counters as of the last read

    def agree(self, processes: Sequence[int | None], lost: Sequence[int]) -> Decision:
        """The survivors, including this rank, and who joins them; the same on all of them.
        Collective."""
        ended = self._find_ended(processes)
        self._report("dead", ended)
        self._report("lost", [rank for rank in lost if rank not in ended])
        self._add("came", self._rank // WORD, 1 << self._rank % WORD)
        marks = self._add("marks", 0, 1)
        begin, next_full = time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            if marks != self._marks or now >= next_full:
                self._read_store()
                self._marks, next_full = marks, now + FULL_S
            here = self._here(processes)
            excluded = self._dead | (self._lost if now - begin >= GRACE_S else set())
            joined = None
            if now >= self._end or len(here | excluded) == self._size:
                joined = self._joined(here)
            if joined is not None:
                decided = self._claim(Decision(sorted(here), joined))
                break
            if (found := self._decided(PAUSE_S)) is not None:
                decided = found
                break
            marks = self._add("marks", 0, 0)
        if not decided.survivors:
            raise self._error(
                f"too few of {self._size} ranks are left to continue: the others may still live; "
                "only a majority of a group may continue"
            )
        if self._rank not in decided.survivors:
            raise self._error(
                f"the others of {self._size} ranks continued without this one: it joined too late "
                "or was reported as lost"
            )
        return decided

    def _joined(self, here: set[int]) -> dict[int, int] | None:
        """As Decision.joined; None: wait for processes that join."""
        if self.joiners is None:
            return {}
        free = {slot: rank for slot, rank in self.free.items() if slot not in here}
        return self.joiners.chosen(self._store, here, free, self._left_s())

    def _here(self, processes: Sequence[int | None]) -> set[int]:
        """The ranks that joined and live; reports processes that ended."""
        if ended := self._find_ended(processes):
            self._report("dead", ended)
            self._add("marks", 0, 1)
        return self._came - self._dead

    def _find_ended(self, processes: Sequence[int | None]) -> list[int]:
        """The ranks that were not known to be dead, and whose processes ended."""
        unknown = set(range(self._size)) - self._dead
        ended = [rank for rank in sorted(unknown) if has_ended(processes[rank])]
        self._dead.update(ended)
        return ended

    def _read_store(self) -> None:
        """Reads which ranks joined and, if that changed, which are dead or lost."""
        losses = self._add("losses", 0, 0)
        words = [self._add("came", i, 0) for i in range((self._size + WORD - 1) // WORD)]
        self._came = {r for r in range(self._size) if words[r // WORD] >> r % WORD & 1}
        if losses == self._losses:
            return
        self._losses = losses
        for kind, known in (("dead", self._dead), ("lost", self._lost)):
            missing = set(range(self._size)) - self._dead - self._came
            numbers = sorted({report_place(rank, self._size)[0] for rank in missing})
            sums = {number: self._add(kind, number, 0) for number in numbers}
            known.update(reported(sums, self._size) & missing)

    def _report(self, kind: str, ranks: Iterable[int]) -> None:
        """Counts the ranks as `kind`, for others that read the store after the next mark."""
        amounts: Counter[int] = Counter()
        for rank in ranks:
            number, amount = report_place(rank, self._size)
            amounts[number] += amount
        for number, amount in amounts.items():
            self._add(kind, number, amount)
        if amounts:
            self._add("losses", 0, 1)

    def post_unreachable(self, peer: int | None) -> None:
        """Reports that this rank could not connect to `peer` in the last forming."""
        if peer is not None:
            text = str(peer).encode()
            self._store.set(f"{self._prefix}unreachable/{self._rank}", text, self._left_s())
            self._add("unconnected", 0, 1)

    def unconnected(self, chosen: Sequence[int]) -> set[tuple[int, int]]:
        """The pairs of survivors that could not connect in the last forming."""
        pairs: set[tuple[int, int]] = set()
        if not self._add("unconnected", 0, 0):
            return pairs
        for rank in chosen:
            try:
                text = self._store.get(f"{self._prefix}unreachable/{rank}", 0.0)
            except Timeout:  # it connected to all
                continue
            peer = int(text) if re.fullmatch(rb"[0-9]{1,9}", text) else rank
            if peer in chosen and peer != rank:
                pairs.add((min(rank, peer), max(rank, peer)))
        return pairs

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

    def _claim(self, decision: Decision) -> Decision:
        """Decides for these survivors, if they are enough, unless there is a decision."""
        here = set(decision.survivors)
        alive = sorted(set(range(self._size)) - self._dead - (self.absent - here))
        half = 2 * len(here) == len(alive) and alive[0] in here
        enough = 2 * len(here) > len(alive) or half
        text = decision.text() if enough else b"none"
        return self._parsed(self._store.claim(self._prefix + "decided", text, self._left_s()))

    def _decided(self, wait_s: float) -> Decision | None:
        """The decision, which another rank wrote or writes within `wait_s`."""
        try:
            text = self._store.get(self._prefix + "decided", wait_s)
        except Timeout:  # no decision yet
            return None
        return self._parsed(text)

    def _parsed(self, text: bytes) -> Decision:
        """The decision in these bytes; raises GroupBroken for invalid bytes."""
        if text == b"none":
            return Decision([])
        match = DECISION.fullmatch(text)
        ranks = [int(word) for word in match[1].split()] if match else []
        pairs = [one.split(b"=") for one in (match[2] or b"").split()] if match else []
        joined = {int(rank): int(n) for rank, n in pairs}
        if (
            not ranks
            or ranks != sorted({rank for rank in ranks if rank < self._size})
            or len(joined) < len(pairs)
            or joined.keys() & set(ranks)
        ):
            raise self._error(
                f"invalid decision in the store: got {text[:60]!r}, expected ascending ranks "
                f"below {self._size}: another program or version of pycomm wrote it"
            )
        return Decision(ranks, joined)

    def _add(self, kind: str, number: int, amount: int) -> int:
        return self._store.add(f"{self._prefix}{kind}/{number}", amount, self._left_s())

    def _left_s(self) -> float:
        """The time limit of a store call."""
        return max(LEAST_S, self._end - time.monotonic())

    def _error(self, text: str) -> GroupBroken:
        return GroupBroken(f'shrink: "{self._name}": {text}', op="shrink", rank=self._rank)
