"""A world for the protocol of membership: ranks, stores, forming and time, without processes.

The protocol decides (pycomm/_bootstrap/protocol.py); this world carries out its actions, one at a
time. `run_script()` interprets tests/unit/membership/*.txt; membership_orders.py tries orders. A
world can be copied, and equal worlds have equal keys.

Of an elastic group each rank serves a store, and all use the first that lives; otherwise one store
lives as long as the run. In `replace()` and `grow()` processes join that ask for a rank.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pycomm._bootstrap import events, protocol
from pycomm._bootstrap.events import Decision
from pycomm._bootstrap.protocol import Growing, Shrinking

SERVER = -1  # of the store that lives as long as the run
ACTIONS = {"votes": "Vote", "looks": "Watch", "decides": "Claim", "forms": "Form"}
ACTIONS |= {"counts": "Count", "settles": "Settle", "settles again": "SettleNext"}


@dataclass
class Rank:
    """A process. `number` is its rank in the first group, or above for one that joins.

    Attributes:
        group: name and processes by rank; None before it joined.
        state, todo: of the call that runs, and the actions that are left.
        answer: of the last call, as scripts write it; "" while it runs.
        dies: the action before which it dies.
    """

    number: int
    alive: bool = True
    stopped: bool = False
    group: tuple[str, tuple[int, ...]] | None = None
    state: Any = None
    todo: list[Any] = field(default_factory=list)
    answer: str = ""
    dies: str = ""
    skipped: set[int] = field(default_factory=set)  # servers
    lost: set[int] = field(default_factory=set)  # processes
    asks: tuple[int, bool] = (-1, False)  # of one that joins: rank, whether no other
    entered: str = ""  # the group that it forms
    joined: dict[int, int] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)  # servers
    voters: tuple[int, ...] = ()  # the processes that decided
    following: tuple[int, ...] = ()  # the processes of the group that it formed

    def copy(self) -> Rank:
        made = copy.copy(self)
        made.todo, made.joined = self.todo.copy(), self.joined.copy()
        made.skipped, made.lost, made.used = self.skipped.copy(), self.lost.copy(), self.used.copy()
        return made

    def key(self) -> Any:
        """Equal for equal ranks."""
        return tuple(repr(value) for value in vars(self).values())


class World:
    """`size` ranks of the group "world"."""

    def __init__(self, size: int, *, elastic: bool = False, hosts: bool = False) -> None:
        everyone, self.size = tuple(range(size)), size
        self.ranks = [Rank(number, group=("world", everyone)) for number in everyone]
        self.elastic, self.hosts = elastic, hosts  # hosts: a process sees no other one
        self.grace = self.late = False
        self.values: dict[tuple[int | None, str], Any] = {}  # by server and key
        self.entered: dict[str, set[int]] = {}  # by group to form: processes
        self.left: set[tuple[str, int]] = set()  # group and process: it could not form it
        self.apart: set[frozenset[int]] = set()  # processes that cannot connect
        self.file: tuple[int, ...] = everyone if elastic else ()  # processes of the last group
        self.formed: list[tuple[str, tuple[int, ...]]] = []  # groups with which all continued

    def copy(self) -> World:
        """Values are never changed, only replaced: containers are copied."""
        made = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (dict, set, list)):
                setattr(made, name, value.copy())
        made.entered = {name: there.copy() for name, there in self.entered.items()}
        made.ranks = [rank.copy() for rank in self.ranks]
        return made

    def key(self) -> Any:
        """Equal for equal worlds."""
        entered = tuple((name, frozenset(there)) for name, there in sorted(self.entered.items()))
        values = frozenset((key, repr(value)) for key, value in self.values.items())
        others = (self.grace, self.late, frozenset(self.left), self.file, tuple(self.formed))
        return tuple(rank.key() for rank in self.ranks), entered, values, others

    # What scripts and schedules do.

    def dies(self, number: int) -> None:
        self.ranks[number].alive = False
        self.ranks[number].todo = []

    def stops(self, number: int) -> None:
        self.ranks[number].stopped = True

    def resumes(self, number: int) -> None:
        self.ranks[number].stopped = False

    def calls(self, number: int, call: str, count: int = 0) -> None:
        """The rank calls shrink(), replace() or grow()."""
        rank = self.ranks[number]
        assert rank.group is not None
        name, processes = rank.group
        own = processes.index(number)
        rank.answer, rank.entered = "", ""
        if call == "grows":
            ranks = (*processes, *range(len(processes), len(processes) + count))
            rank.state = Growing(own, len(processes), f"{name}+1", ranks)
        else:
            lost = {
                r
                for r, p in enumerate(processes)
                if p in rank.lost or not self.ranks[p].alive or self.ranks[p].stopped
            }
            state = Shrinking(own, name, processes, tuple(range(len(processes))))
            rank.state = dataclasses.replace(
                state, lost=frozenset(lost - {own}), joins=call == "replaces"
            )
        rank.todo = [events.Begin()]

    def joins(self, rank: int, only: bool) -> None:
        """A new process asks to join, for a rank (-1: any)."""
        self.ranks.append(Rank(len(self.ranks), asks=(rank, only)))

    # One step of a rank.

    def can_continue(self, rank: Rank) -> bool:
        """Whether it has an action that it need not wait for."""
        if not (rank.alive and rank.todo) or rank.stopped:
            return False
        return not rank.entered or self._forming(rank) != "waits"

    def step(self, rank: Rank) -> None:
        """The next action of the rank, and what the protocol says to it."""
        action = rank.todo[0]
        kind = type(action).__name__
        if rank.dies == kind and not rank.entered:
            return self.dies(rank.number)
        if kind == "Form" and not rank.entered:
            return self._enter(rank, action)
        rank.todo.pop(0)
        server = self._server(rank)
        if server is None and kind not in ("Begin", "Form", "Done", "Fail", "Follow"):
            rank.todo = []
            rank.state, rank.todo = protocol.step(rank.state, events.Moved())
            return None
        event = getattr(self, f"do_{kind.lower()}")(rank, action)
        if event is not None:
            rank.state, rank.todo = protocol.step(rank.state, event)
        return None

    def _server(self, rank: Rank) -> int | None:
        """The server in use; None: that one ended, and the next is used from now on."""
        if not self.elastic:
            return SERVER
        for one in self._order(rank):
            server = self.ranks[one]
            if server.alive and (one == rank.number or one in rank.used or not server.stopped):
                rank.used.add(one)
                return one
            rank.skipped.add(one)
            if one in rank.used:
                return None
        return None

    def _order(self, rank: Rank) -> list[int]:
        assert rank.group is not None
        return [one for one in rank.group[1] if one not in rank.skipped]

    def _get(self, rank: Rank, key: str, default: Any) -> Any:
        return self.values.get((self._server(rank), key), default)

    def _put(self, rank: Rank, key: str, value: Any) -> None:
        self.values[self._server(rank), key] = value

    def _ballot(self, rank: Rank) -> str:
        name: str = rank.state.name
        return f"{name}/grow" if isinstance(rank.state, Growing) else name

    def _members(self, rank: Rank) -> list[int]:
        """The process of each rank of the group that votes; -1: it was to join."""
        assert rank.group is not None
        if isinstance(rank.state, Growing):
            return list(rank.group[1])
        return [rank.group[1][m] if m >= 0 else -1 for m in rank.state.members]

    def _ended(self, rank: Rank) -> frozenset[int]:
        if self.hosts:
            return frozenset()
        members = enumerate(self._members(rank))
        return frozenset(r for r, p in members if p >= 0 and not self.ranks[p].alive)

    def do_begin(self, rank: Rank, _: Any) -> Any:
        return events.Began(self._ended(rank))

    def do_repeat(self, rank: Rank, action: Any) -> None:
        self._claimed(rank, action.name, action.decision)

    def _claimed(self, rank: Rank, name: str, decision: Decision) -> Decision:
        key = f"{name}/decided"
        first: Decision = self._get(rank, key, decision)
        self._put(rank, key, first)
        return first

    def do_postunreachable(self, rank: Rank, action: Any) -> None:
        key = f"{self._ballot(rank)}/unreachable"
        own = rank.state.members.index(rank.state.rank)
        self._put(rank, key, {**self._get(rank, key, {}), own: action.peer})

    def do_report(self, rank: Rank, action: Any) -> None:
        key = f"{self._ballot(rank)}/{action.kind}"
        self._put(rank, key, self._get(rank, key, frozenset()) | action.ranks)

    def do_vote(self, rank: Rank, _: Any) -> None:
        key = f"{self._ballot(rank)}/came"
        own = rank.state.election.rank
        self._put(rank, key, self._get(rank, key, frozenset()) | {own})

    def do_watch(self, rank: Rank, _: Any) -> Any:
        name = self._ballot(rank)
        came, dead, lost = (
            self._get(rank, f"{name}/{kind}", frozenset()) for kind in ("came", "dead", "lost")
        )
        decision = self._get(rank, f"{name}/decided", None)
        successors = self._successors(rank, self._members(rank))
        return events.Seen(
            came, dead, lost, self._ended(rank), self.grace, self.late, decision, successors
        )

    def _successors(self, rank: Rank, members: Sequence[int]) -> frozenset[int] | None:
        """Those in the file, if it is of a later group, without this rank."""
        new = max(members) >= self.size and max(members) > max(self.file, default=0)
        if not self.elastic or rank.number in self.file or new:
            return None
        return frozenset(r for r, p in enumerate(members) if p in self.file) or None

    def do_ask(self, rank: Rank, _: Any) -> Any:
        waiting = {p.number: p.asks for p in self.ranks if p.group is None and p.alive}
        return events.Asked(waiting, float("inf"), self.late)

    def do_claim(self, rank: Rank, action: Any) -> Any:
        first = self._claimed(rank, self._ballot(rank), action.decision)
        return events.Decided(first, self._ended(rank), self.late)

    def do_compare(self, rank: Rank, action: Any) -> Any:
        found: dict[int, int] = self._get(rank, f"{self._ballot(rank)}/unreachable", {})
        pairs = {(min(a, b), max(a, b)) for a, b in found.items() if {a, b} <= action.survivors}
        rank.voters = tuple(self._members(rank))
        return events.Compared(frozenset(pairs), self._ended(rank))

    def do_awaitreaders(self, rank: Rank, action: Any) -> None:
        """Others read the store, which does not end in this world."""

    def do_follow(self, rank: Rank, action: Any) -> None:
        rank.joined = {action.slots.index(slot): n for slot, n in action.joined.items()}

    def _enter(self, rank: Rank, action: Any) -> None:
        """The rank begins to form the group, and tells the processes that join."""
        rank.entered = action.name
        self.entered.setdefault(action.name, set()).add(rank.number)
        processes = self._processes(rank)
        for new in rank.joined.values():
            if self.ranks[new].alive and not self.ranks[new].stopped:
                self.entered[action.name].add(new)
                self.ranks[new].group = (action.name, processes)

    def _processes(self, rank: Rank) -> tuple[int, ...]:
        """Of the group that it forms, by rank."""
        if isinstance(rank.state, Growing):
            assert rank.group is not None
            return (*rank.group[1], *(rank.joined[r] for r in sorted(rank.joined)))
        members = self._members(rank)
        return tuple(rank.joined[r] if p < 0 else p for r, p in enumerate(members))

    def _forming(self, rank: Rank) -> str:
        """What becomes of the forming: "formed", "failed" or "waits"."""
        name, processes = rank.entered, self._processes(rank)
        there = self.entered[name]
        if any((name, p) in self.left for p in processes) or self._cut(rank, processes):
            return "failed"
        if all(p in there for p in processes):
            return "formed"
        return "failed" if any(self._is_gone(p) for p in processes) else "waits"

    def _is_gone(self, number: int) -> bool:
        rank = self.ranks[number]
        return not rank.alive or rank.stopped or bool(rank.answer and not rank.todo)

    def _cut(self, rank: Rank, processes: tuple[int, ...]) -> list[int]:
        return [p for p in processes if frozenset((rank.number, p)) in self.apart]

    def do_form(self, rank: Rank, action: Any) -> Any:
        name, processes = rank.entered, self._processes(rank)
        cut, outcome = self._cut(rank, processes), self._forming(rank)
        rank.entered = ""
        if outcome == "formed":
            rank.joined = {} if isinstance(rank.state, Shrinking) else rank.joined
            rank.asks = (-1, False)
            rank.following = processes
            return events.Formed(self._successors(rank, rank.voters or processes))
        self.left.add((name, rank.number))
        peer = processes.index(cut[0]) if cut else None
        return events.NotFormed("a rank was lost", peer, self.late)

    def do_count(self, rank: Rank, action: Any) -> Any:
        key = f"{rank.state.name}/formed"
        count = self._get(rank, key, 0) + action.formed
        self._put(rank, key, count)
        return events.Counted(count, not (self.late or self._ended(rank)))

    def do_awaitoutcome(self, rank: Rank, _: Any) -> Any:
        return events.Outcome(self._get(rank, f"{rank.state.name}/outcome", None))

    def do_settle(self, rank: Rank, action: Any) -> Any:
        key = f"{rank.state.name}/outcome"
        first = self._get(rank, key, action.formed)
        self._put(rank, key, first)
        return events.Outcome(first, action.final)

    def do_settlenext(self, rank: Rank, action: Any) -> Any:
        if not self.elastic:
            return events.Outcome(action.formed, final=True)
        mine = self._server(rank)
        others = [o for o in self._order(rank) if o != mine and self.ranks[o].alive]
        if not others:
            return events.Outcome(action.formed, final=True)
        first = self.values.setdefault((others[0], f"{rank.state.name}/outcome"), action.formed)
        return events.Outcome(first, final=True)

    def do_claimnone(self, rank: Rank, _: Any) -> None:
        self._claimed(rank, self._ballot(rank), Decision())

    def do_done(self, rank: Rank, _: Any) -> None:
        name = rank.state.name
        processes = rank.following
        rank.group, rank.lost = (name, processes), set()
        rank.skipped, rank.used = set(), set()
        rank.answer = "ranks " + " ".join(map(str, processes))
        if self.elastic:
            self.file = processes
        others = [self.ranks[p] for p in processes]
        if all(o.group == rank.group for o in others) and rank.group not in self.formed:
            self.formed.append(rank.group)

    def do_fail(self, rank: Rank, action: Any) -> None:
        kind = action.kind.__name__ if action.kind else "PeerLost"
        assert rank.group is not None
        pair = [str(rank.group[1][r]) for r in action.pair or ()]
        text = action.text or ("cannot connect: " + " ".join(pair) if pair else "a rank was lost")
        rank.answer = f"{kind} {text}"

    def run(self) -> None:
        """Until all ranks wait or ended."""
        while True:
            before = self.key()
            for rank in self.ranks:
                seen = {self.key()}
                while self.can_continue(rank):
                    self.step(rank)
                    if self.key() in seen:  # it waits for a change
                        break
                    seen.add(self.key())
            if self.key() == before:
                return


# Scripts.

WHO = r"(?P<who>[0-9, and]+)"
LINES: dict[str, str] = {
    r"(\d) ranks(?P<elastic>, elastic)?(?P<hosts>, each on a host)?": "begin",
    rf"{WHO} dies?": "dies",
    rf"{WHO} ends?": "dies",
    rf"{WHO} stops?": "stops",
    rf"{WHO} resumes?": "resumes",
    rf"{WHO} dies? before it (?P<moment>.+)": "trap",
    rf"{WHO} loses? (?P<peer>\d)": "loses",
    rf"{WHO} cannot connect": "apart",
    rf"{WHO} (?P<call>shrink|replace)s?": "calls",
    rf"{WHO} grows? by (?P<count>\d)": "calls",
    rf"{WHO} joins(?: for rank (?P<rank>\d))?(?P<only> only)?": "joins",
    r"half a second passes": "grace",
    r"the limit passes": "late",
    rf"-> {WHO}: (?P<answer>.+)": "expect",
}


def numbers(text: str) -> list[int]:
    """The ranks in "0, 1 and 2"."""
    return [int(word) for word in re.findall(r"\d+", text)]


def run_script(text: str) -> None:
    """Does what the lines say. Raises AssertionError if a rank answers otherwise."""
    world = World(0)
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        patterns = [(re.fullmatch(pattern, line), what) for pattern, what in LINES.items()]
        match, what = [(m, what) for m, what in patterns if m][-1]
        assert match is not None
        given = match.groupdict()
        who = numbers(given.get("who") or "")
        if what == "begin":
            world = World(int(match[1]), elastic=bool(given["elastic"]), hosts=bool(given["hosts"]))
        elif what == "expect":
            for number in who:
                rank = world.ranks[number]
                found = rank.answer or ("waits" if rank.todo else "nothing")
                assert found == given["answer"], f"{line}: got {found}"
        elif what == "joins":
            world.joins(int(given["rank"] or -1), bool(given["only"]))
        elif what in ("grace", "late"):
            setattr(world, what, True)
        elif what == "apart":
            world.apart.add(frozenset(who))
        for number in who:
            _do(world, what, number, given)
        world.run()


def _do(world: World, what: str, number: int, given: dict[str, Any]) -> None:
    if what in ("dies", "stops", "resumes"):
        getattr(world, what)(number)
    elif what == "trap":
        world.ranks[number].dies = ACTIONS[given["moment"]]
    elif what == "loses":
        world.ranks[number].lost.add(int(given["peer"]))
    elif what == "calls":
        call = given.get("call")
        world.calls(number, f"{call}s" if call else "grows", int(given.get("count") or 0))
