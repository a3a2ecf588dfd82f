"""Processes that join an elastic group: their requests, the survivors' choice and answers.

Keys in the store, under elastic/:

    arrived/0      number of requests
    request/<n>    the n-th, from 1: the rank that the process asks for and whether it takes no
                   other, its process id, its server
    answered/<n>   above 0: it has an answer
    answer/<n>     the group that it joins

Values are JSON. Every survivor writes the same answers, so that one that dies delays nothing.

The launcher writes two files beside that of the group, and its supervisors the second:

    <file>.processes    how many processes are in the run, or can still be started
    <file>.ended        a rank ended with success
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm import _core
from pycomm._bootstrap import events
from pycomm._bootstrap.driver import LEAST_S, PAUSE_S, Driver
from pycomm._bootstrap.elastic_store import (
    LIMIT_S,
    LOOPBACK,
    Elastic,
    Server,
    StoreMoved,
    SurvivingStore,
    read_file,
    rows_of,
    serve,
    servers_of,
    successors,
)
from pycomm._bootstrap.protocol import Joining
from pycomm.errors import GroupBroken, Mismatch, PeerLost, Timeout

PREFIX = "elastic/"
# Between two looks at the file while a process waits for an answer.
LOOK_S = 0.5
# For a new file, or one that says that the training ended, after all ranks in the old one ended.
STALE_S = 2.0
# A rank that calls shrink() again after a store call timed out repeats its reports.
SPARE_BITS = 3


@dataclass(frozen=True)
class Request:
    """What a joining process asks for.

    Attributes:
        rank: as in Group.ranks; -1 for any.
        only: the process takes no other rank.
        server: the process's store.
        machine, pid, started: the process.
    """

    rank: int
    only: bool
    server: Server
    machine: str
    pid: int
    started: int

    def is_alive(self) -> bool:
        """False if the process is known to have ended."""
        return self.machine != _machine() or process_start(self.pid) == self.started


@dataclass(frozen=True)
class Answer:
    """The group that a process joins, and its rank there.

    Attributes:
        name, rank, ranks: of the group; `ranks` is Group.ranks.
        servers: of the ranks.
        options: that must be equal on all ranks.
        form_s: limit of the forming.
        outcome: the key in the store under which the ranks decide whether the group is used; "": it
            is.
    """

    name: str
    rank: int
    ranks: list[int]
    servers: list[Server]
    options: dict[str, Any]
    form_s: float
    outcome: str


def process_start(pid: int) -> int:
    """When a process started, as Member.started; 0 if it ended, or unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # it ended, or /proc hides it
        return 0
    fields = stat.rpartition(b")")[2].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _machine() -> str:
    """Equal for processes that see each other's process ids."""
    with contextlib.suppress(OSError):  # /proc is hidden
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def report_place(rank: int, size: int) -> tuple[int, int]:
    """Which number in the store counts the reports about this rank of `size`, and what adds one."""
    bits = size.bit_length() + SPARE_BITS
    number, place = divmod(rank, 63 // bits)
    return number, 1 << place * bits


def reported(sums: Mapping[int, int], size: int) -> set[int]:
    """The ranks of `size` that were reported, of those that these numbers in the store count."""
    places = {rank: report_place(rank, size) for rank in range(size)}
    most = (1 << size.bit_length() + SPARE_BITS) - 1
    return {
        rank
        for rank, (number, one) in places.items()
        if number in sums and sums[number] // one & most
    }


class Joiners:
    """Reads the requests of processes for the free ranks of a group.

    Args:
        until: by the steady clock: afterwards do without those that are missing.
        file: that of the group, to wait only for processes that its launcher can start; "": for
            all.
        answered: as of Elastic; the requests found to have an answer are added.
    """

    def __init__(
        self, until: float, answered: set[tuple[Server | None, int]], file: str = ""
    ) -> None:
        self.until, self._answered, self._file = until, answered, file
        # By server and number; None: invalid.
        self._requests: dict[tuple[Server | None, int], Request | None] = {}

    def asked(self, store: Any, left_s: float) -> events.Asked:
        """The requests in the store; `left_s`: the limit of a store call."""
        found = self._unanswered(store, left_s).items()
        waiting = {n: (one.rank, one.only) for n, one in found if one.is_alive()}
        return events.Asked(waiting, _processes_left(self._file), time.monotonic() >= self.until)

    def _unanswered(self, store: Any, left_s: float) -> dict[int, Request]:
        """The valid requests without an answer, by number."""
        found = {}
        for n in range(1, 1 + store.add(f"{PREFIX}arrived/0", 0, left_s)):
            place = (store.server, n)
            if place in self._answered:
                continue
            if store.add(f"{PREFIX}answered/{n}", 0, left_s):  # perhaps in an attempt that failed
                self._answered.add(place)
                continue
            if place not in self._requests:
                with contextlib.suppress(Timeout):  # the process has yet to write its request
                    self._requests[place] = read_request(store, n)
            if request := self._requests.get(place):
                found[n] = request
        return found


def _processes_left(file: str) -> float:
    """The number of processes in the run or still to come, by the launcher; infinite without it."""
    if not file:
        return math.inf
    try:
        return int(Path(f"{file}.processes").read_text())
    except (OSError, ValueError):  # no launcher
        return math.inf


def write_request(
    store: Any, rank: int, server: Server, pid: int, left_s: float, only: bool = True
) -> int:
    """Asks for a rank for the process `pid`, as of Request; returns the number of the request."""
    only = only and rank >= 0
    text = json.dumps([rank, only, _machine(), pid, process_start(pid), *rows_of([server])])
    n = int(store.add(f"{PREFIX}arrived/0", 1, left_s))
    store.set(f"{PREFIX}request/{n}", text.encode(), left_s)
    return n


def read_request(store: Any, n: int) -> Request | None:
    """The n-th request; None if it is invalid. Raises Timeout if there is none."""
    text = store.get(f"{PREFIX}request/{n}", 0.0)
    try:
        rank, only, machine, pid, started, server = json.loads(text)
        address = servers_of([server])[0]
        return Request(int(rank), bool(only), address, str(machine), int(pid), int(started))
    except (ValueError, TypeError, RecursionError):  # of another version of pycomm
        return None


def invite(
    store: Any,
    elastic: Elastic,
    name: str,
    ranks: list[int],
    slots: Sequence[int],
    joined: Mapping[int, int],
    limit_s: float,
    outcome: str = "",
) -> Elastic:
    """Tells the processes that join which group it is; returns what the group passes on.

    Args:
        elastic: of the group before.
        name, ranks: of the new group.
        slots: by rank of the new group: that in the group before.
        joined: by rank in the group before: the number of the request.
        limit_s: of the forming.
        outcome: as of Answer.

    Raises:
        PeerLost: a request is not in this store: it was in that of a rank that ended.
    """
    servers = {}
    for slot, n in joined.items():
        request = None
        with contextlib.suppress(Timeout):  # handled below
            request = read_request(store, n)
        if request is None:
            raise PeerLost(f"the process that was to become rank {slot} asked another store")
        servers[slot] = request.server
    after = elastic.after(slots, servers)
    for slot, n in joined.items():
        rank = slots.index(slot)
        given = Answer(name, rank, ranks, after.servers, elastic.options, limit_s, outcome)
        text = json.dumps({**vars(given), "servers": rows_of(after.servers)})
        store.add(f"{PREFIX}answered/{n}", 1, limit_s)
        store.set(f"{PREFIX}answer/{n}", text.encode(), limit_s)
        elastic.answered.add((store.server, n))
    return after


class Joiner(Driver):
    """Joins the elastic group whose ranks' addresses are in `file`: run() returns it.

    Args:
        end: the time limit, by the steady clock.
        rank: the rank that this process asks for, as in Group.ranks; None: any.
        connect: forms the group of an answer.
        launched: the launcher started this process: it takes any rank, preferably `rank`, and waits
            until the training ends.

    Attributes:
        elastic: what the group passes on.

    Raises:
        SystemExit: a rank ended with success, and none needs this process.
        Timeout: the group did not call grow() or replace() in time.
        PeerLost: no rank of the group lives.
        InvalidArgument: the file is invalid.
    """

    first = events.Do.FIND
    retried = (PeerLost, Timeout, GroupBroken)
    elastic: Elastic
    _own: tuple[_core.TcpStore, Server] | None = None
    _lost_at = math.inf  # when no server was left

    def __init__(
        self,
        file: str,
        key: str,
        rank: int | None,
        end: float,
        connect: Callable[[SurvivingStore, Answer], _core.Group],
        *,
        launched: bool = False,
    ) -> None:
        self._file, self._key, self._connect = file, key, connect
        self._rank, self._only = -1 if rank is None else rank, not launched
        self._end = math.inf if launched else end
        self.state = Joining()
        self._servers: list[Server] = []
        self._store = SurvivingStore([], key)

    @property
    def _late(self) -> bool:
        return time.monotonic() >= self._end

    def do_find(self, _: events.Action) -> events.Found:
        servers = read_file(self._file)
        fresh = bool(servers and (servers != self._servers or self._store.server))
        now = time.monotonic()
        self._lost_at = math.inf if fresh else min(self._lost_at, now)
        if fresh:
            self._servers = servers
        else:
            time.sleep(PAUSE_S)  # polls: a file sends no notifications
        ended = os.path.exists(f"{self._file}.ended")
        return events.Found(fresh, ended, now - self._lost_at >= STALE_S, self._late)

    def do_request(self, _: events.Action) -> None:
        host = self._servers[0].host
        self._own = self._own or serve(host, host == LOOPBACK, self._key, 0)
        self._store = SurvivingStore(self._servers, self._key)
        left_s = min(LIMIT_S, max(LEAST_S, self._end - time.monotonic()))
        self._number = write_request(
            self._store, self._rank, self._own[1], os.getpid(), left_s, self._only
        )

    def do_await_answer(self, _: events.Action) -> events.Answered:
        outdated = self._store.server not in read_file(self._file)
        try:
            wait_s = 0.0 if outdated else LOOK_S
            text = self._store.get(f"{PREFIX}answer/{self._number}", wait_s)
        except Timeout:  # not answered yet
            return events.Answered(outdated=outdated, late=self._late)
        given = self._given = _answer_of(text)
        form = events.Form(given.name, tuple(given.ranks), given.rank)
        return events.Answered(form, bool(given.outcome))

    def do_form(self, _: events.Form) -> events.Formed:
        given = self._given
        self.made = self._connect(self._store, given)
        assert self._own is not None
        elastic = Elastic(self._file, self._key, given.servers, self._own[0], given.options)
        new = [r for r, one in enumerate(given.servers) if one.generation == elastic.generation]
        self.elastic = dataclasses.replace(elastic, joined=tuple(new))
        return events.Formed(successors(elastic, given.rank))

    def do_await_outcome(self, _: events.Action) -> events.Outcome:
        text = self._store.get(self._given.outcome, self._given.form_s)
        return events.Outcome(text == b"formed", final=True)

    def do_report(self, action: events.Report) -> None:
        """As Ballot.report() of shrink.py, of the group that this process does not use."""
        if self.made is not None:
            self.made.abort("the others do not use this group")
            self.made = None
        (rank,) = action.ranks
        number, one = report_place(rank, len(self._given.ranks))
        try:
            for key, amount in ((f"{action.kind}/{number}", one), ("losses/0", 1), ("marks/0", 1)):
                self._store.add(f"{self._given.name}/shrink/{key}", amount, LEAST_S)
        except StoreMoved:  # again in the store of the next rank
            raise
        except (PeerLost, Timeout):  # no rank is left that could wait
            pass

    def do_end(self, _: events.Action) -> None:
        self.failure = SystemExit(0)

    def do_fail(self, action: events.Fail) -> None:
        text = f"join: {self._file}: {action.text}"
        self.failure = action.kind(text, op="init") if action.kind else self.error


def _answer_of(text: bytes) -> Answer:
    try:
        given = json.loads(text)
        return Answer(**{**given, "servers": servers_of(given["servers"])})
    except (ValueError, TypeError, KeyError, RecursionError):  # of another version of pycomm
        raise Mismatch("join: invalid answer: the group has another version of pycomm") from None
