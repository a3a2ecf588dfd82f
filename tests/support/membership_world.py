"""A world for the protocol of membership: ranks, stores, forming and time, without processes.

The protocol decides (pycomm/_bootstrap/protocol.py); this world carries out its actions, one at a
time. membership_scripts.py interprets tests/unit/membership/*.txt; membership_orders.py tries
orders. A world can be copied, and equal worlds have equal keys.

Of an elastic group each rank serves a store, and all use the first that lives; otherwise one store
lives as long as the run. Processes that join find the ranks in the file of the group, and ask.
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
from pycomm._bootstrap.protocol import Growing, Joining, Shrinking

SERVER = -1  # of the store that lives as long as the run
WITHOUT_STORE = ("begin", "find", "form", "done", "end", "fail", "follow")


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
    request: tuple[int | None, int] = (None, 0)  # of one that joins: server and number
    entered: str = ""  # the group that it forms
    joined: dict[int, int] = field(default_factory=dict)  # by rank: the number of the request
    invited: dict[int, int] = field(default_factory=dict)  # by rank: the process
    server: int | None = None  # that has its answers
    used: set[int] = field(default_factory=set)  # servers
    servers: tuple[int, ...] = ()  # of one that joins
    given: Any = None  # of one that joins: name and processes of the group, as answered
    voters: tuple[int, ...] = ()  # the processes that decided
    following: tuple[int, ...] = ()  # the processes of the group that it formed
    known: str = ""  # its key, until it changes

    def copy(self) -> Rank:
        made = Rank(**{**vars(self), "known": ""})
        made.todo, made.joined = self.todo.copy(), self.joined.copy()
        made.invited = self.invited.copy()
        made.skipped, made.lost, made.used = self.skipped.copy(), self.lost.copy(), self.used.copy()
        return made

    def key(self) -> str:
        """Equal for equal ranks."""
        self.known = self.known or repr(vars(self))
        return self.known


class World:
    """`size` ranks of the group "world"."""

    def __init__(self, size: int, *, elastic: bool = False, hosts: bool = False) -> None:
        everyone, self.size = tuple(range(size)), size
        self.ranks = [Rank(number, group=("world", everyone)) for number in everyone]
        self.elastic, self.hosts = elastic, hosts  # hosts: a process sees no other one
        self.grace = self.stale = self.late = self.ended = False
        self.values: dict[tuple[int | None, str], Any] = {}  # by server and key
        self.entered: dict[Any, set[int]] = {}  # by name and processes of a group to form
        self.left: set[tuple[str, int]] = set()  # group and process: it could not form it
        self.apart: set[frozenset[int]] = set()  # processes that cannot connect
        self.file: tuple[int, ...] = everyone if elastic else ()  # processes of the last group
        self.newest = "world"  # its name
        self.returned: set[tuple[str, tuple[int, ...]]] = set()  # to a rank of them

    def copy(self) -> World:
        """Values and ranks are never changed, only replaced: containers are copied."""
        made = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (dict, set, list)):
                setattr(made, name, value.copy())
        made.entered = {group: there.copy() for group, there in self.entered.items()}
        return made

    def changed(self, number: int) -> Rank:
        """The rank, which may be changed: other worlds keep theirs."""
        self.ranks[number] = self.ranks[number].copy()
        return self.ranks[number]

    def key(self) -> Any:
        """Equal for equal worlds."""
        entered = tuple((group, frozenset(there)) for group, there in sorted(self.entered.items()))
        values = frozenset((key, repr(value)) for key, value in self.values.items())
        times = (self.grace, self.stale, self.late, self.ended)
        groups = (self.file, self.newest, frozenset(self.returned), frozenset(self.left))
        return tuple(rank.key() for rank in self.ranks), entered, values, times, groups

    # What scripts and schedules do.

    def dies(self, number: int) -> None:
        rank = self.changed(number)
        rank.alive, rank.todo = False, []

    def stops(self, number: int) -> None:
        self.changed(number).stopped = True

    def resumes(self, number: int) -> None:
        self.changed(number).stopped = False

    def calls(self, number: int, call: str, count: int = 0) -> None:
        """The rank calls shrink(), replace() or grow()."""
        rank = self.changed(number)
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
        rank.todo = [events.Do.BEGIN]

    def joins(self, rank: int, only: bool) -> None:
        """A new process asks to join, for a rank (-1: any)."""
        new = Rank(len(self.ranks), asks=(rank, only), state=Joining(), todo=[events.Do.FIND])
        self.ranks.append(new)

    # One step of a rank.

    def can_continue(self, rank: Rank) -> bool:
        """Whether it has an action that it need not wait for."""
        if not (rank.alive and rank.todo) or rank.stopped:
            return False
        if isinstance(rank.state, Joining) and rank.todo[0] is events.Do.AWAIT_OUTCOME:
            server = rank.request[0]
            known = (server, f"{rank.state.name}/outcome") in self.values
            return self.late or known or server is None or not self.ranks[server].alive
        return not rank.entered or self._forming(rank) != "waits"

    def step(self, rank: Rank) -> None:
        """The next action of the rank, and what the protocol says to it."""
        rank.known, action = "", rank.todo[0]
        kind = events.name_of(action)
        if rank.dies == kind and not rank.entered:
            rank.alive, rank.todo = False, []
            return None
        if kind == "form" and not rank.entered:
            return self._enter(rank, action)
        rank.todo.pop(0)
        server = self._server(rank)
        if server is None and kind not in WITHOUT_STORE:
            if isinstance(rank.state, Joining) and kind == "report" and not self._order(rank):
                return None  # no rank is left that could wait
            event = events.NotFormed() if rank.group is None else events.Moved()
            rank.state, rank.todo = protocol.step(rank.state, event)
            return None
        event = getattr(self, f"do_{kind}")(rank, action)
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
        servers = rank.group[1] if rank.group else rank.servers
        return [one for one in sorted(servers) if one not in rank.skipped]

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
        if isinstance(rank.state, Joining):
            self.left.add((rank.state.name, rank.number))

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
        successors = self._successors(rank, self._members(rank), rank.state.name)
        return events.Seen(
            came, dead, lost, self._ended(rank), self.grace, self.late, decision, successors
        )

    def _successors(self, rank: Rank, members: Sequence[int], name: str) -> frozenset[int] | None:
        """Of these members, those in the file, if that is without this rank, and not of a group
        older than this one."""
        older = age(self.newest) < age(name)
        if not self.elastic or rank.number in self.file or older:
            return None
        return frozenset(r for r, p in enumerate(members) if p in self.file)

    def do_ask(self, rank: Rank, _: Any) -> Any:
        waiting = {}
        for n, number in enumerate(self._get(rank, "requests", ()), 1):
            asking = self.ranks[number]
            if asking.alive and self._get(rank, f"answer/{n}", None) is None:
                waiting[n] = asking.asks
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
        """The rank begins to form the group. A survivor answers those that join before."""
        requests = self._get(rank, "requests", ())
        if any(n > len(requests) for n in rank.joined.values()):  # they asked in another store
            self.left.add((action.name, rank.number))
            event = events.NotFormed("a process asked another store", None, self.late)
            rank.state, rank.todo = protocol.step(rank.state, event)
            return
        rank.invited = {r: requests[n - 1] for r, n in rank.joined.items()}
        rank.entered, rank.server = action.name, self._server(rank)
        group = (action.name, self._processes(rank))
        self.entered.setdefault(group, set()).add(rank.number)
        for r, n in rank.joined.items():
            self._put(rank, f"answer/{n}", (*group, r, isinstance(rank.state, Growing)))

    def _processes(self, rank: Rank) -> tuple[int, ...]:
        """Of the group that it forms, by rank."""
        if isinstance(rank.state, Joining):
            return tuple(rank.given[1])
        if isinstance(rank.state, Growing):
            assert rank.group is not None
            return (*rank.group[1], *(rank.invited[r] for r in sorted(rank.invited)))
        members = self._members(rank)
        return tuple(rank.invited[r] if p < 0 else p for r, p in enumerate(members))

    def _forming(self, rank: Rank) -> str:
        """What becomes of the forming: "formed", "failed" or "waits"."""
        name, processes = rank.entered, self._processes(rank)
        there = self.entered[name, processes]
        if any((name, p) in self.left for p in processes) or self._cut(rank, processes):
            return "failed"
        if all(p in there for p in processes):
            return "formed"
        asked = {rank.invited[r]: (rank.server, n) for r, n in rank.joined.items()}
        missing = set(processes) - there
        gone = any(self._is_gone(p, name, asked.get(p)) for p in missing)
        return "failed" if gone or any(map(self._has_ended, processes)) else "waits"

    def _has_ended(self, number: int) -> bool:
        rank = self.ranks[number]
        return not rank.alive or rank.stopped or bool(rank.answer and not rank.todo)

    def _is_gone(self, number: int, name: str, asked: Any) -> bool:
        """Whether this process, which was asked to join, reads another answer."""
        rank = self.ranks[number]
        return asked is not None and rank.request != asked and (rank.given or [""])[0] != name

    def _cut(self, rank: Rank, processes: tuple[int, ...]) -> list[int]:
        return [p for p in processes if frozenset((rank.number, p)) in self.apart]

    def do_form(self, rank: Rank, action: Any) -> Any:
        name, processes = rank.entered, self._processes(rank)
        cut, outcome = self._cut(rank, processes), self._forming(rank)
        rank.entered = ""
        if outcome == "formed":
            rank.joined = {} if isinstance(rank.state, Shrinking) else rank.joined
            rank.following = processes
            if isinstance(rank.state, Shrinking):
                return events.Formed(self._successors(rank, rank.voters, rank.state.decided[-1][0]))
            return events.Formed(self._successors(rank, processes, name))
        self.left.add((name, rank.number))
        peer = processes.index(cut[0]) if cut else None
        return events.NotFormed("a rank was lost", peer, self.late)

    def do_find(self, rank: Rank, _: Any) -> Any:
        fresh = bool(self.file) and (self.file != rank.servers or bool(self._order(rank)))
        rank.request, rank.given = (None, 0), None
        if fresh:
            rank.servers, rank.skipped, rank.used = self.file, set(), set()
        return events.Found(fresh, self.ended, self.stale, self.late)

    def do_request(self, rank: Rank, _: Any) -> None:
        requests = (*self._get(rank, "requests", ()), rank.number)
        self._put(rank, "requests", requests)
        rank.request = (self._server(rank), len(requests))

    def do_await_answer(self, rank: Rank, _: Any) -> Any:
        server, n = rank.request
        rank.given = self._get(rank, f"answer/{n}", None)
        if rank.given is None:
            return events.Answered(None, False, server not in self.file, self.late)
        name, processes, number, decides = rank.given
        return events.Answered(events.Form(name, processes, number), decides)

    def do_count(self, rank: Rank, action: Any) -> Any:
        key = f"{rank.state.name}/formed"
        count = self._get(rank, key, 0) + action.formed
        self._put(rank, key, count)
        return events.Counted(count, not (self.late or self._ended(rank)))

    def do_await_outcome(self, rank: Rank, _: Any) -> Any:
        found = self._get(rank, f"{rank.state.name}/outcome", None)
        if isinstance(rank.state, Joining) and found is None:
            return events.NotFormed("no outcome")
        return events.Outcome(found)

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

    def do_claim_none(self, rank: Rank, _: Any) -> None:
        self._claimed(rank, self._ballot(rank), Decision())

    def do_done(self, rank: Rank, _: Any) -> None:
        name = rank.state.name
        processes = rank.following
        rank.group, rank.lost = (name, processes), set()
        rank.skipped, rank.used, rank.voters = set(), set(), ()
        rank.answer = "ranks " + " ".join(map(str, processes))
        self.returned.add(rank.group)
        if self.elastic and self._successors(rank, processes, name) is None:
            self.file, self.newest = processes, name

    def do_end(self, rank: Rank, _: Any) -> None:
        rank.answer = "ends"

    def do_fail(self, rank: Rank, action: Any) -> None:
        kind = action.kind.__name__ if action.kind else "PeerLost"
        pair = [str(rank.group[1][r]) for r in action.pair or () if rank.group]
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


def age(name: str) -> int:
    """Of a group: higher than of those before it."""
    return sum(int(number) for number in re.findall(r"[+~](\d+)", name))
