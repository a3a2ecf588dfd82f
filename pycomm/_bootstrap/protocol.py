"""Who is in the group that follows another one: a function of a rank's state and an event.

`step(state, event)` returns the rank's next state and its actions. It does no I/O, reads no clock
and has no thread: time passed, a process that ended and a lost store are events. shrink.py, grow.py
and joining.py carry the actions out in the rendezvous store; tests/unit/membership does so in a
world of its own, in all orders.

The actions of a step are done in order, and the last one yields the next event. If the store ends
with the process that served it, the rest is dropped and the event is `Moved`: the next server is
that of another rank.

shrink() and replace():

    vote     each survivor writes to the store which ranks it lost, and that it is present
    watch    until every rank voted or is known to be dead
    claim    the first rank to see that writes the list of survivors, which is final
    form     the survivors form a new group; if one is lost meanwhile, they start again

Ranks are numbered as in the broken group; after a failed forming, as in the group that failed to
form, whose name is used. So a rank that formed the new group and then loses a peer meets the others
in the next attempt.

grow() votes likewise, and forms a new group only if all ranks are present and enough processes
join. The outcome is final too: "formed" once every rank has formed it, else "failed". A rank writes
it to the store of the next rank before it returns.

A process that joins finds the ranks in a file, asks in their store, and forms the group that they
answer. If that fails, it reports that it is not in the group, and asks again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from pycomm._bootstrap.events import (
    NO_RANKS,
    Action,
    Answered,
    Asked,
    AwaitReaders,
    Began,
    Claim,
    Compare,
    Compared,
    Count,
    Counted,
    Decided,
    Decision,
    Do,
    Event,
    Fail,
    Follow,
    Form,
    Formed,
    Found,
    Moved,
    NotFormed,
    Outcome,
    PostUnreachable,
    Ranks,
    Repeat,
    Report,
    Seen,
    Settle,
    SettleNext,
)
from pycomm.errors import GroupBroken, PeerLost, Timeout


@dataclass(frozen=True)
class Election:
    """What a rank knows of the others.

    Attributes:
        rank, size: of this rank in the group that failed last.
        absent: ranks whose processes were to join, and that have no vote unless they come.
        came, dead, lost: as of Seen, from all that was seen.
    """

    rank: int
    size: int
    absent: Ranks = NO_RANKS
    came: Ranks = NO_RANKS
    dead: Ranks = NO_RANKS
    lost: Ranks = NO_RANKS

    @property
    def here(self) -> Ranks:
        """The ranks that voted and live."""
        return self.came - self.dead

    def vote(self, lost: Ranks) -> list[Action]:
        """The first actions."""
        unsure = lost - self.dead
        return [Report("dead", self.dead), Report("lost", unsure), Do.VOTE, Do.WATCH]

    def seen(self, event: Seen) -> tuple[Election, list[Action]]:
        """After a look into the store."""
        if failure := _left_behind(event.successors):
            return self, [failure]
        found = event.ended - self.dead
        after = dataclasses.replace(
            self,
            came=self.came | event.came,
            dead=self.dead | event.dead | event.ended,
            lost=self.lost | event.lost,
        )
        reports = [Report("dead", found)] if found else []
        given_up = after.dead | (after.lost if event.grace else NO_RANKS)
        complete = event.late or len(after.here | given_up) == self.size
        return after, [*reports, Do.ASK if complete else Do.WATCH]

    def decision(self, joined: Mapping[int, int]) -> Decision:
        """Of the ranks that may live, a majority continues."""
        alive = frozenset(range(self.size)) - self.dead - (self.absent - self.here)
        return Decision(self.here, joined) if is_majority(self.here, alive) else Decision()

    def asked(self, event: Asked, free: Mapping[int, int]) -> list[Action]:
        """After Ask. `free`: by rank that a process can take: that in Group.ranks."""
        joined = choose(event, self.here, free)
        return [Do.WATCH if joined is None else Claim(self.decision(joined))]

    def refusal(self, decision: Decision) -> str:
        """Why this rank does not continue; "" if it does."""
        if not decision.survivors:
            return (
                f"too few of {self.size} ranks are left to continue: the others may still live; "
                "only a majority of a group may continue"
            )
        if self.rank not in decision.survivors:
            return (
                f"the others of {self.size} ranks continued without this one: it joined too late "
                "or was reported as lost"
            )
        return ""


def is_majority(some: Ranks, ranks: Ranks) -> bool:
    """Whether `some` of these ranks are more than half of them, or half with the lowest."""
    return 2 * len(some) + (min(ranks) in some) > len(ranks)


def without_pairs(pairs: set[tuple[int, int]]) -> Ranks:
    """Few ranks that are in all of these pairs: without them no pair is left. Of two ranks in
    equally many pairs the higher, since the lower serves a store sooner."""
    found: set[int] = set()
    while left := [pair for pair in pairs if not found & set(pair)]:
        counts = Counter(rank for pair in left for rank in pair)
        found.add(max(counts, key=lambda rank: (counts[rank], rank)))
    return frozenset(found)


def choose(asked: Asked, here: Ranks, free: Mapping[int, int]) -> dict[int, int] | None:
    """The number of the request for each free rank; None: wait for more requests. A process gets
    the rank that it asks for; others get the lowest in order of arrival."""
    free = {slot: rank for slot, rank in free.items() if slot not in here}
    slots = {rank: slot for slot, rank in free.items()}
    asks = {rank: n for n, (rank, _) in reversed([*asked.requests.items()]) if rank in slots}
    chosen = {slots[rank]: n for rank, n in asks.items()}
    others = [n for n, (_, only) in asked.requests.items() if not (only or n in chosen.values())]
    chosen |= zip(sorted(free.keys() - chosen.keys()), others, strict=False)
    missing = len(chosen) < min(len(free), asked.processes - len(here))
    return None if missing and not asked.over else chosen


@dataclass(frozen=True)
class Shrinking:
    """A rank in shrink() or replace().

    Attributes:
        rank: in the group that broke.
        name, ranks: of the group that failed last; `ranks` is Group.ranks.
        members: by rank of it: the rank in the group that broke; -1: the process was to join.
        lost: the ranks that this one lost.
        joins: processes may join.
        unreachable: the peer that this rank could not connect to in the last forming.
        unconnected: pairs of ranks of the group that broke that could not connect then.
        excluded: could not connect to others in two attempts, as numbered in the group that votes.
        decided: by group.
        attempt: how many groups failed to form, because of slow or lost ranks.
        election: the current one.
    """

    rank: int
    name: str
    ranks: tuple[int, ...]
    members: tuple[int, ...]
    lost: Ranks = NO_RANKS
    joins: bool = False
    unreachable: int | None = None
    unconnected: frozenset[tuple[int, int]] = frozenset()
    excluded: Ranks = NO_RANKS
    decided: tuple[tuple[str, Decision], ...] = ()
    attempt: int = 0
    election: Election = Election(0, 0)

    def on_moved(self, _: Moved) -> tuple[Shrinking, list[Action]]:
        return self, [Do.BEGIN]

    def on_began(self, event: Began) -> tuple[Shrinking, list[Action]]:
        absent = frozenset(rank for rank, member in enumerate(self.members) if member < 0)
        own = self.members.index(self.rank)
        election = Election(own, len(self.members), absent, dead=event.ended | self.excluded)
        posts = [] if self.unreachable is None else [PostUnreachable(self.unreachable)]
        earlier = [Repeat(*one) for one in self.decided]
        actions = [*earlier, *posts, *election.vote(self.lost | absent)]
        return dataclasses.replace(self, election=election), actions

    def on_seen(self, event: Seen) -> tuple[Shrinking, list[Action]]:
        if event.decision is not None:
            return self.on_decided(Decided(event.decision))
        election, actions = self.election.seen(event)
        return dataclasses.replace(self, election=election), actions

    def on_asked(self, event: Asked) -> tuple[Shrinking, list[Action]]:
        return self, self.election.asked(event, dict(enumerate(self.ranks)) if self.joins else {})

    def on_decided(self, event: Decided) -> tuple[Shrinking, list[Action]]:
        decision = event.decision
        if why := self.election.refusal(decision):
            return self, [Fail(GroupBroken, why)]
        decided = (*self.decided, (self.name, decision))
        return dataclasses.replace(self, decided=decided), [Compare(decision.survivors)]

    def on_compared(self, event: Compared) -> tuple[Shrinking, list[Action]]:
        """Forms the group. Ranks that could not connect in two attempts are not in it: the others
        vote again without them, if they may continue."""
        _, decision = self.decided[-1]
        pairs = {(self.members[a], self.members[b]): (a, b) for a, b in event.pairs}
        unconnected = frozenset(pair for pair in pairs if min(pair) >= 0)
        slots = tuple(sorted([*decision.survivors, *decision.joined]))
        twice = unconnected & self.unconnected
        excluded = without_pairs({pairs[pair] for pair in twice})
        here = decision.survivors - excluded
        if self.election.rank in excluded or not is_majority(here, decision.survivors):
            pair = min(twice, key=lambda pair: (self.rank not in pair, pair))
            return self, [AwaitReaders(len(decision.survivors)), Fail(PeerLost, pair=pair)]
        after = dataclasses.replace(
            self,
            name=name_after(self.name),
            ranks=tuple(self.ranks[s] for s in slots),
            members=tuple(self.members[s] if s in decision.survivors else -1 for s in slots),
            lost=NO_RANKS,
            unreachable=None,
            unconnected=unconnected,
            excluded=frozenset(map(slots.index, excluded)),
        )
        follow = Follow(slots, decision.joined)
        # Before the processes that join get an answer.
        if excluded or event.ended & decision.survivors:
            return after, [follow, Do.BEGIN]
        form = Form(after.name, after.ranks, after.members.index(self.rank), self.attempt)
        return after, [follow, form]

    def on_formed(self, event: Formed) -> tuple[Shrinking, list[Action]]:
        return self, [_left_behind(event.successors) or Do.DONE]

    def on_notformed(self, event: NotFormed) -> tuple[Shrinking, list[Action]]:
        attempt = self.attempt + (event.unreachable is None)
        after = dataclasses.replace(self, unreachable=event.unreachable, attempt=attempt)
        return after, [Fail() if event.late else Do.BEGIN]


@dataclass(frozen=True)
class Growing:
    """A rank in grow().

    Attributes:
        rank, size: in the group that grows.
        name, ranks: of the new group; `ranks` is Group.ranks.
        chosen: the processes that join are known.
        formed: this rank formed the new group.
        why: it did not.
        election: whether all ranks are present.
    """

    rank: int
    size: int
    name: str
    ranks: tuple[int, ...]
    chosen: bool = False
    formed: bool = False
    why: str = "another rank did not form the new group"
    election: Election = Election(0, 0)

    def on_moved(self, _: Moved) -> tuple[Growing, list[Action]]:
        if self.chosen:  # the store of the next rank has the outcome if a rank knew it
            return self, [Settle(formed=False, final=True)]
        return self, [Do.CLAIM_NONE, Fail(PeerLost, "a rank ended, which served the store")]

    def on_began(self, event: Began) -> tuple[Growing, list[Action]]:
        election = Election(self.rank, self.size, dead=event.ended)
        return dataclasses.replace(self, election=election), election.vote(NO_RANKS)

    def on_seen(self, event: Seen) -> tuple[Growing, list[Action]]:
        if event.decision is not None:
            return self.on_decided(Decided(event.decision, event.ended, event.late))
        election, actions = self.election.seen(event)
        return dataclasses.replace(self, election=election), actions

    def on_asked(self, event: Asked) -> tuple[Growing, list[Action]]:
        new = {slot: self.ranks[slot] for slot in range(self.size, len(self.ranks))}
        return self, self.election.asked(event, new)

    def on_decided(self, event: Decided) -> tuple[Growing, list[Action]]:
        decision, every = event.decision, frozenset(range(self.size))
        refused = bool(self.election.refusal(decision))
        missing = every if refused else every - decision.survivors
        count = len(self.ranks) - self.size
        failure = None
        if dead := missing & (event.ended | self.election.dead):
            failure = Fail(PeerLost, f"rank {min(dead)} died")
        elif refused and not event.late:
            failure = Fail(PeerLost, "a rank ended, which served the store")
        elif refused:
            failure = Fail(Timeout, "not all ranks called grow() in time")
        elif missing:
            failure = Fail(Timeout, f"these ranks did not call grow(): {sorted(missing)}")
        elif (asked := len(decision.joined)) < count:
            failure = Fail(Timeout, f"{asked} of {count} processes asked to join in time")
        if failure is not None:
            return self, [failure]
        follow = Follow(tuple(range(len(self.ranks))), decision.joined)
        form = Form(self.name, self.ranks, self.rank)
        return dataclasses.replace(self, chosen=True), [follow, form]

    def on_formed(self, _: Formed) -> tuple[Growing, list[Action]]:
        return dataclasses.replace(self, formed=True), [Count(formed=True)]

    def on_notformed(self, event: NotFormed) -> tuple[Growing, list[Action]]:
        return dataclasses.replace(self, why=event.why), [Count(formed=False)]

    def on_counted(self, event: Counted) -> tuple[Growing, list[Action]]:
        complete = event.count >= self.size
        if self.formed and event.waits and not complete:
            return self, [Do.AWAIT_OUTCOME]
        return self, [Settle(self.formed and complete)]

    def on_outcome(self, event: Outcome) -> tuple[Growing, list[Action]]:
        if event.formed is None:
            return self, [Count(formed=False)]
        if not event.final:
            return self, [SettleNext(event.formed)]
        return self, [Do.DONE if event.formed and self.formed else Fail(PeerLost, self.why)]


@dataclass(frozen=True)
class Joining:
    """A process in join().

    Attributes:
        name, rank: of the group that it was to form last, and its rank there; "": none.
        decides: as of Answered.
        failure: of the last attempt.
    """

    name: str = ""
    rank: int = -1
    decides: bool = False
    failure: Fail | None = None

    def on_found(self, event: Found) -> tuple[Joining, list[Action]]:
        after = dataclasses.replace(self, name="")
        if event.ended and not event.fresh:
            return after, [Do.END]
        if event.late and (self.failure or not event.fresh):
            return after, [self.failure or Fail(Timeout, "no elastic group wrote this file")]
        if event.fresh:
            return after, [Do.REQUEST, Do.AWAIT_ANSWER]
        return after, [self.failure if self.failure and event.stale else Do.FIND]

    def on_answered(self, event: Answered) -> tuple[Joining, list[Action]]:
        if event.form is not None:
            name, rank = event.form.name, event.form.rank
            return Joining(name, rank, event.decides), [event.form]
        if event.late:
            return self, [Fail(Timeout, "the group did not call grow() or replace() in time")]
        if event.outdated:  # the others continued without the rank that serves this store
            return self._again(Fail(PeerLost, "the rank that served the store left the group"))
        return self, [Do.AWAIT_ANSWER]

    def on_formed(self, event: Formed) -> tuple[Joining, list[Action]]:
        if failure := _left_behind(event.successors):
            return self._again(failure)
        return self, [Do.AWAIT_OUTCOME if self.decides else Do.DONE]

    def on_outcome(self, event: Outcome) -> tuple[Joining, list[Action]]:
        if event.formed:
            return self, [Do.DONE]
        return self._again(Fail(GroupBroken, "a rank did not form the new group"))

    def on_notformed(self, _: NotFormed) -> tuple[Joining, list[Action]]:
        return self._again(Fail())

    def _again(self, failure: Fail) -> tuple[Joining, list[Action]]:
        """A rank that formed the group with this process, and lost another one, must not wait for
        this process, nor count it, in the next election."""
        reports = [Report("dead", frozenset({self.rank}))] if self.name else []
        return dataclasses.replace(self, failure=failure), [*reports, Do.FIND]


State = TypeVar("State", Shrinking, Growing, Joining)


def step(state: State, event: Event) -> tuple[State, list[Action]]:
    """The next state, and the actions to do in order."""
    handler = getattr(state, f"on_{type(event).__name__.lower()}")
    after: tuple[State, list[Action]] = handler(event)
    return after


def name_after(name: str) -> str:
    """The name of the next group: "world~1" becomes "world~2"."""
    first, mark, number = name.rpartition("~")
    return f"{first}~{int(number) + 1}" if mark and number.isdigit() else f"{name}~1"


def _left_behind(successors: Ranks | None) -> Fail | None:
    """The error of a rank without which others continued; None if they did not."""
    if successors is None:
        return None
    if not successors:
        return Fail(GroupBroken, "processes that joined continued without this rank")
    *most, last = sorted(successors)
    names = f"ranks {', '.join(map(str, most))} and {last}" if most else f"rank {last}"
    return Fail(GroupBroken, f"{names} continued without this rank")
