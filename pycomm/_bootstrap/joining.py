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
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm import _core
from pycomm._bootstrap.elastic_store import (
    LIMIT_S,
    Elastic,
    Server,
    StoreMoved,
    SurvivingStore,
    read_file,
    rows_of,
    serve,
    servers_of,
)
from pycomm._bootstrap.events import Asked
from pycomm.errors import Error, GroupBroken, Mismatch, PeerLost, Timeout

PREFIX = "elastic/"
LEAST_S = 0.3  # what a store gets to answer in, even at the end of the limit
PAUSE_S = 0.01  # between two polls of the store
# Between two looks at the file while a process waits for an answer.
LOOK_S = 0.5
# For a new file, or one that says that the training ended, after all ranks in the old one ended.
STALE_S = 2.0
# A rank that calls shrink() again after a store call timed out repeats its reports.
SPARE_BITS = 3


class TrainingEnded(Exception):
    """The ranks ended with success and did not need this process."""


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

    def asked(self, store: Any, left_s: float) -> Asked:
        """The requests in the store; `left_s`: the limit of a store call."""
        found = self._unanswered(store, left_s).items()
        waiting = {n: (one.rank, one.only) for n, one in found if one.is_alive()}
        return Asked(waiting, _processes_left(self._file), time.monotonic() >= self.until)

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


def _answer_of(text: bytes) -> Answer:
    try:
        given = json.loads(text)
        return Answer(**{**given, "servers": servers_of(given["servers"])})
    except (ValueError, TypeError, KeyError, RecursionError):  # of another version of pycomm
        raise Mismatch("join: invalid answer: the group has another version of pycomm") from None


def join(
    file: str,
    key: str,
    rank: int | None,
    end: float,
    connect: Callable[[SurvivingStore, Answer], _core.Group],
    *,
    launched: bool = False,
) -> tuple[_core.Group, Elastic]:
    """Joins the elastic group whose ranks' addresses are in `file`.

    Args:
        end: the time limit, by the steady clock.
        rank: the rank that this process asks for, as in Group.ranks; None: any.
        connect: forms the group of an answer.
        launched: the launcher started this process: it takes any rank, preferably `rank`, and waits
            until the training ends.

    Raises:
        TrainingEnded: `launched`, and the ranks ended with success.
        Timeout: the group did not call grow() or replace() in time.
        PeerLost: no rank of the group lives.
        InvalidArgument: the file is invalid.
    """
    own: tuple[_core.TcpStore, Server] | None = None
    end = math.inf if launched else end
    while True:
        given = None
        servers = _wait_for_servers(file, end)
        first = servers[0].host
        own = own or serve(first, first == "127.0.0.1", key, 0)
        store = SurvivingStore(servers, key)
        try:
            left_s = min(LIMIT_S, max(LEAST_S, end - time.monotonic()))
            asked = -1 if rank is None else rank
            n = write_request(store, asked, own[1], os.getpid(), left_s, not launched)
            given = _wait_for_answer(store, n, file, end)
            core = connect(store, given)
            try:
                _wait_for_outcome(store, given)
            except Error:  # the others do not use this group
                core.abort("the group that was to grow stays as it was")
                raise
            last = max(one.generation for one in given.servers)
            new = tuple(r for r, one in enumerate(given.servers) if one.generation == last)
            return core, Elastic(file, key, given.servers, own[0], given.options, new)
        # Another rank was lost meanwhile, or this process was not quick enough: ask again.
        except (PeerLost, Timeout, GroupBroken):
            if given is not None:
                _report_not_joined(store, given)
            if time.monotonic() >= end or _all_ended(store, file, servers):
                raise


def _report_not_joined(store: SurvivingStore, given: Answer) -> None:
    """For a rank that formed the group with this process, and lost another one: it must not wait
    for this process, nor count it, in the next election (shrink.py)."""
    number, one = report_place(given.rank, len(given.ranks))
    with contextlib.suppress(PeerLost, Timeout):  # no rank is left that could wait
        while True:
            try:
                for key, amount in ((f"dead/{number}", one), ("losses/0", 1), ("marks/0", 1)):
                    store.add(f"{given.name}/shrink/{key}", amount, LEAST_S)
                return
            except StoreMoved:  # again in the store of the next rank
                continue


def _all_ended(store: SurvivingStore, file: str, servers: list[Server]) -> bool:
    """Whether no server lives, and no other file appears."""
    end = time.monotonic() + STALE_S
    while store.server is None and read_file(file) == servers:
        _check_not_ended(file)
        if time.monotonic() >= end:
            return True
        time.sleep(PAUSE_S)  # polls: a file sends no notifications
    return False


def _wait_for_servers(file: str, end: float) -> list[Server]:
    while not (servers := read_file(file)):
        _check_not_ended(file)
        if time.monotonic() >= end:
            raise Timeout(f"join: no elastic group wrote {file}", op="init")
        time.sleep(PAUSE_S)  # polls: a file sends no notifications
    return servers


def _check_not_ended(file: str) -> None:
    if os.path.exists(f"{file}.ended"):
        raise TrainingEnded


def _wait_for_answer(store: SurvivingStore, n: int, file: str, end: float) -> Answer:
    """Raises PeerLost, also as StoreMoved, if the request has to be repeated."""
    while True:
        left = store.server in read_file(file)
        with contextlib.suppress(Timeout):  # not answered yet
            return _answer_of(store.get(f"{PREFIX}answer/{n}", LOOK_S if left else 0.0))
        if time.monotonic() >= end:
            raise Timeout("join: the group did not call grow() or replace() in time", op="init")
        if not left:  # the others continued without the rank that serves this store
            raise PeerLost("join: the rank that served the store left the group", op="init")


def _wait_for_outcome(store: SurvivingStore, given: Answer) -> None:
    if given.outcome and store.get(given.outcome, given.form_s) != b"formed":
        raise GroupBroken("join: a rank did not form the new group", op="init")
