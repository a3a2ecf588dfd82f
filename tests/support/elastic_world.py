"""Processes of elastic groups in one deterministic world, for every order of their events.

Real: the agreement of shrink.py, grow.py and joining.py, and SurvivingStore. Simulated: stores, the
file of addresses, the forming of groups, processes and time. A process is a thread that runs from
one event to the next, while the others stop; a schedule chooses which one continues. Events are
calls of a store and of a group, and pauses. Time passes only when all wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pycomm._bootstrap import elastic_store, grow, joining, shrink
from pycomm._bootstrap.elastic_store import Elastic, Server, SurvivingStore
from pycomm._bootstrap.events import Decision
from pycomm._bootstrap.joining import Answer, Joiners
from pycomm._bootstrap.shrink import Ballot
from pycomm.errors import PeerLost, Timeout

LIMIT_S = 60.0  # of calls, in simulated time
END_S = 1000.0  # afterwards a process waits without end
KEY = "0" * 64

# The processes that can continue, by number -> the one that does.
Schedule = Callable[[list[int]], int]


class Died(BaseException):
    """Ends the thread of a process that dies."""


class Process:
    """A process; `dies_at`: the number of the event before which it dies."""

    def __init__(self, world: World, number: int, body: Callable[[], Any], dies_at: int) -> None:
        self.world, self.number, self.dies_at = world, number, dies_at
        self.events, self.alive, self.ended = 0, dies_at != 0, dies_at == 0
        self.ended_at = 0.0
        self.turn = threading.Semaphore(0)
        self.can_continue: Callable[[], bool] = lambda: True
        self.until, self.pause_s, self.seen = END_S, 0.0, -1
        self.result: Any = None
        self.store = Store(self)
        self.thread = threading.Thread(target=self._run, args=(body,), daemon=True)

    def _run(self, body: Callable[[], Any]) -> None:
        self.turn.acquire()
        try:
            self.result = body()
        except Died:  # the simulated process ends here
            self.alive = False
        except Exception as error:  # examined by the test
            self.result = error
        self.ended, self.ended_at = True, self.world.clock
        self.world.scheduler.release()


class Group:
    """What a process holds of a group, as _core.Group; `key` is equal on all members."""

    def __init__(self, world: World, key: Any, rank: int, members: list[int]) -> None:
        self.world, self.key, self.rank, self.numbers = world, key, rank, members
        self.name, self.ranks, self.size = key[0], list(key[1]), len(key[1])

    def lost(self) -> list[int]:
        """Whose connection closed; an abort is no loss."""
        world = self.world
        return [
            rank
            for rank, number in enumerate(self.numbers)
            if not world.processes[number].alive or (self.key, number) in world.closed
        ]

    def abort(self, _: str) -> None:
        self.world.left.add((self.key, self.numbers[self.rank]))

    def barrier(self) -> None:
        """Raises PeerLost if another rank died or left before."""
        world, own = self.world, self.numbers[self.rank]
        world.arrived.add((self.key, own))
        others = [number for number in self.numbers if number != own]

        def all_came() -> bool:
            return all((self.key, number) in world.arrived for number in others)

        def broken() -> bool:
            return any(
                not world.processes[number].alive or (self.key, number) in world.left | world.closed
                for number in others
            )

        if not world.wait(lambda: all_came() or broken(), world.clock + LIMIT_S):
            raise Timeout("barrier")
        if not all_came():
            raise PeerLost("barrier")


class Store:
    """The store of a process, which ends with it, as _core.TcpStore."""

    def __init__(self, process: Process) -> None:
        self.process, self.port = process, process.number + 1
        self.values: dict[str, bytes] = {}

    def _event(self, can_continue: Callable[[], bool] = lambda: True, until: float = END_S) -> bool:
        found = self.process.world.wait(
            lambda: not self.process.alive or self.process.ended or can_continue(), until
        )
        if not self.process.alive or self.process.ended:
            raise PeerLost("the store ended")
        return found

    def set(self, key: str, value: bytes, _: float = 0.0) -> None:
        self._event()
        self.values[key] = value
        self.process.world.changes += 1

    def get(self, key: str, timeout_s: float) -> bytes:
        world = self.process.world
        # Between two polls, as a pause.
        wait_s = world.paused(timeout_s) if 0 < timeout_s <= shrink.PAUSE_S else timeout_s
        if not self._event(lambda: key in self.values, world.clock + wait_s):
            raise Timeout(key)
        return self.values[key]

    def add(self, key: str, amount: int, _: float = 0.0) -> int:
        self._event()
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        self.process.world.changes += bool(amount)
        return total

    def claim(self, key: str, value: bytes, _: float = 0.0) -> bytes:
        self._event()
        self.process.world.changes += 1
        return self.values.setdefault(key, value)


class World:
    """One run. `bodies` are the processes, ranks first; `deaths`: by process, at which event."""

    def __init__(self, schedule: Schedule, deaths: dict[int, int]) -> None:
        self.clock, self.changes = 0.0, 0
        self.scheduler = threading.Semaphore(0)
        self.processes: list[Process] = []
        self.current: Process | None = None
        self.left: set[Any] = set()  # group and process: it aborted the group
        self.closed: set[Any] = set()  # the same: it could not form the group
        self.arrived: set[Any] = set()
        self.present: dict[Any, dict[int, int]] = {}  # by group to form: rank to process
        self.file: list[Server] = []
        self.decisions: list[tuple[str, int, bytes]] = []  # group, process, decision
        self._schedule, self._deaths = schedule, deaths

    def start(self, body: Callable[[], Any]) -> Process:
        """Adds a process."""
        number = len(self.processes)
        process = Process(self, number, body, self._deaths.get(number, -1))
        self.processes.append(process)
        return process

    def run(self) -> None:
        """Runs all to their end. Raises AssertionError if one waits without end."""
        for process in self.processes:
            if not process.ended:
                process.thread.start()
        while left := [process for process in self.processes if not process.ended]:
            if self._continue_one():
                self.scheduler.acquire()
            else:
                self.clock = min(process.until for process in left)
                assert self.clock < END_S, f"process {left[0].number} waits without end"

    def _continue_one(self) -> bool:
        """Lets the process run that the schedule chooses; False: all wait."""
        left = [process for process in self.processes if not process.ended]
        ready = [p.number for p in left if p.can_continue() or self.clock >= p.until]
        if ready:
            self.current = self.processes[self._schedule(ready)]
            self.current.turn.release()
        return bool(ready)

    def stop(self) -> None:
        """Ends the threads that are left, after a failure."""
        for process in self.processes:
            while process.thread.is_alive():
                process.dies_at = process.events + 1
                process.turn.release()
                process.thread.join(0.01)

    @property
    def own(self) -> Process:
        """The process that runs."""
        assert self.current is not None
        return self.current

    def wait(self, can_continue: Callable[[], bool], until: float) -> bool:
        """An event of this process: lets others run until the condition holds or the time comes;
        returns whether it holds."""
        process = self.own
        process.can_continue, process.until = can_continue, until
        if process.events == process.dies_at:
            raise Died
        if not self._continue_one():
            self.scheduler.release()
        process.turn.acquire()
        process.events += 1
        if process.events == process.dies_at:
            raise Died
        return can_continue()

    def paused(self, seconds: float) -> float:
        """How long this process pauses between two polls: longer each time while no store
        changes."""
        process = self.own
        same = process.seen == self.changes
        process.pause_s = min(0.5, 2 * process.pause_s) if same else seconds
        process.seen = self.changes
        return process.pause_s

    def pause(self, seconds: float) -> None:
        """As time.sleep."""
        self.wait(lambda: False, self.clock + self.paused(seconds))

    def server(self, number: int, generation: int = 0) -> Server:
        return Server(generation, "h", number + 1)

    def group(self, rank: int, size: int) -> Group:
        """The first group of a rank."""
        return Group(self, ("world", tuple(range(size))), rank, list(range(size)))

    def elastic(self, rank: int, size: int) -> Elastic:
        servers = [self.server(number) for number in range(size)]
        own: Any = self.processes[rank].store
        return Elastic("file", KEY, servers, own, {})

    def form(self, name: str, rank: int, ranks: list[int], limit_s: float) -> Group:
        """A group of those that call this. A rank may succeed that loses a peer at once."""
        key = (name, tuple(ranks))
        members = self.present.setdefault(key, {})
        members[rank] = self.own.number

        def broken() -> bool:
            return any(
                not self.processes[number].alive or (key, number) in self.closed | self.left
                for number in members.values()
            )

        done = self.wait(lambda: len(members) == len(ranks) or broken(), self.clock + limit_s)
        if broken() or not done:
            self.closed.add((key, self.own.number))
            raise PeerLost("a rank was lost while the group formed") if done else Timeout("form")
        return Group(self, key, rank, [members[one] for one in range(len(ranks))])

    def replace(self, group: Group, elastic: Elastic, wait_s: float) -> tuple[Group, Elastic]:
        """As Group.replace()."""
        joiners = Joiners(self.clock + wait_s, elastic.answered)
        core: Any = group
        made, after = shrink.regroup(core, elastic.store(group.rank), LIMIT_S, elastic, joiners)
        assert after is not None
        self.file = after.servers
        return made, after  # type: ignore[return-value]  # simulated

    def grow(self, group: Group, elastic: Elastic, count: int) -> tuple[Group, Elastic]:
        """As Group.grow()."""
        core: Any = group
        made, after = grow.grow(core, elastic.store(group.rank), elastic, count, LIMIT_S)
        self.file = after.servers
        group.abort("closed")
        return made, after  # type: ignore[return-value]  # simulated

    def join(self, limit_s: float) -> tuple[Group, Elastic]:
        """As pycomm.join()."""

        def connect(_: Any, given: Answer) -> Any:
            return self.form(given.name, given.rank, given.ranks, given.form_s)

        joiner = joining.Joiner("file", KEY, None, self.clock + limit_s, connect)
        made: Any = joiner.run()
        self.file = joiner.elastic.servers
        return made, joiner.elastic


def simulate(world: World) -> None:
    """Runs the world, which the code of pycomm gets in place of the system."""
    clock = SimpleNamespace(monotonic=lambda: world.clock, sleep=world.pause)

    def has_ended(number: int | None) -> bool:
        return number is not None and not world.processes[number].alive

    @contextlib.contextmanager
    def processes_of(core: Any) -> Iterator[list[int]]:
        yield core.numbers

    def regroup(_: Any, __: Any, name: str, rank: int, ranks: list[int], limit_s: float) -> Any:
        return world.form(name, rank, ranks, limit_s)

    def connect(store: SurvivingStore, server: Server, _: float) -> Any:
        process = world.processes[server.port - 1]
        return process.store if process.alive and not process.ended else None

    def serve(*_: Any) -> Any:
        return world.own.store, world.server(world.own.number)

    parsed = Ballot._parsed

    def record(ballot: Ballot, text: bytes) -> Decision:
        decision = parsed(ballot, text)
        if decision.survivors:
            world.decisions.append((ballot._name, world.own.number, text))
        return decision

    core = SimpleNamespace(regroup=regroup)
    system = SimpleNamespace(
        getpid=lambda: world.own.number + 1, path=SimpleNamespace(exists=lambda _: False)
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (shrink, grow, joining, elastic_store):
            patch.setattr(module, "time", clock)
        for module in (shrink, grow):
            patch.setattr(module, "_core", core)
            patch.setattr(module, "has_ended", has_ended)
            patch.setattr(module, "processes_of", processes_of)
        patch.setattr(joining, "os", system)
        patch.setattr(joining, "serve", serve)
        for module in (joining, elastic_store):
            patch.setattr(module, "read_file", lambda _: world.file)
        patch.setattr(joining, "_machine", lambda: "machine")
        patch.setattr(joining, "process_start", lambda pid: 0 if has_ended(pid - 1) else pid)
        patch.setattr(joining, "_processes_left", lambda _: float("inf"))
        patch.setattr(SurvivingStore, "_connect", connect)
        patch.setattr(Ballot, "_parsed", record)
        try:
            world.run()
        except BaseException:  # includes Ctrl-C: the threads must end
            world.stop()
            raise
