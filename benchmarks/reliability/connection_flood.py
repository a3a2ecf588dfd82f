"""`python -m benchmarks connection_flood`: hostile connections, and starts and stops on one port.

    flood      two ranks with 1,024 descriptors form and train while unauthenticated clients connect
               to every listener, in each of the manners of unauthenticated.py. The step rate is
               compared with the rate while they connect to an unused port, so that both include the
               processor time of the clients
    cycles     rank 0 starts and stops a group on one port in one process, with a rank 1 that is
               another process each time and is killed in every second one
    distant    ranks that are 10, 50 and 100 ms away join a group, and connect in mid-run to a rank
               that they have not met, beside 8,000, 1,500 and 800 hostile connections a second
               (delayed_flood.py): pycomm only, since gloo forms no group among unauthenticated
               clients

The first two use pycomm and gloo, in turn. Exits with 1 if pycomm failed, leaked a descriptor, made
less than nine tenths of the steps, or delayed a distant rank by more than 2 s.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.reliability import command, delayed_flood
from benchmarks.reliability.command import Child
from benchmarks.reliability.delayed_flood import clients_on, ranks_on
from pycomm.bench.support import delayed_link

BACKENDS = ("pycomm", "gloo")
PER_S = 2000  # calls of the unauthenticated clients
STEPS = 3000  # of a stretch: about half a second
STRETCHES = 5
WARM_CYCLES = 10  # before what is open is counted
MOST_FAILURES = 5  # then the cycles end
LEAST_KEPT = 0.9

Held = dict[str, int]


@dataclass
class Flood:
    """The outcome of one job among unauthenticated clients; seconds and rates of rank 0."""

    backend: str
    connected: int = 0  # connections of unauthenticated clients
    refused: int = 0
    forming_quiet_s: float = -1.0
    forming_s: float = -1.0  # of rank 1, the last
    steps_per_s_decoy: float = 0.0
    steps_per_s: float = 0.0
    descriptors_quiet: int = 0
    descriptors: int = 0  # after the flood
    let_in: int = 0  # clients that received more than an unauthenticated client may
    error: str = ""

    def add(self, counted: Mapping[str, float]) -> None:
        """Adds the counts of clients."""
        self.connected += int(counted.get("connected", 0))
        self.refused += int(counted.get("refused", 0))
        self.let_in += int(counted.get("let_in", 0))

    def kept(self) -> bool:
        """Whether pycomm did what it guarantees."""
        return self.backend != "pycomm" or (
            not self.error
            and not self.let_in
            and self.descriptors <= self.descriptors_quiet
            and self.steps_per_s >= LEAST_KEPT * self.steps_per_s_decoy
        )


@dataclass
class Cycles:
    """The outcome of starts and stops; what was open after the first and the last of them."""

    backend: str
    cycles: int = 0
    failures: list[str] = field(default_factory=list)
    first: Held | None = None  # at least, in some cycles
    last: Held | None = None
    files: int = 0  # of pycomm, left in /dev/shm
    seconds: float = 0.0

    def kept(self) -> bool:
        """Whether pycomm did not fail, and left no descriptor, thread or file."""
        first, last = self.first or {}, self.last or {}
        more = [
            name for name in ("descriptors", "threads") if last.get(name, 0) > first.get(name, 0)
        ]
        return self.backend != "pycomm" or not (self.failures or more or self.files)


def main(argv: Sequence[str]) -> int:
    """Runs, prints, stores; returns the exit status."""
    parser = command.parser("connection_flood", __doc__)
    parser.add_argument("--connections", type=int, default=10_000, help="(%(default)s)")
    parser.add_argument("--cycles", type=int, default=1000, help="(%(default)s)")
    parser.add_argument(
        "--peers", type=command.some_of(BACKENDS), default=",".join(BACKENDS), help="(%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each distance (%(default)s)")
    options = parser.parse_args(argv)
    floods = [flood(backend, options.connections) for backend in options.peers]
    rounds = [cycles(backend, options.cycles) for backend in options.peers]
    why_not = "no rounds" if options.rounds < 1 else delayed_link.missing()
    far = [] if why_not else delayed_flood.measure(options.rounds)
    command.report(
        options.json,
        flood=[asdict(one) for one in floods],
        cycles=[asdict(one) for one in rounds],
        distant=[one.summary() for one in far],
    )
    if why_not:
        command.CONSOLE.print(f"no distant ranks: {why_not}")
    kept = [one.kept() for some in (floods, rounds, far) for one in some]
    return 0 if all(kept) else 1


def flood(backend: str, connections: int) -> Flood:
    """Runs a job without unauthenticated clients, then one with them, while it forms and while it
    trains."""
    found = Flood(backend)
    with ranks_on([None, None], command.free_port(), backend) as pair:
        for rank in pair:
            rank.send("form")
        found.forming_quiet_s = [rank.figure() for rank in pair][1]
        _rate(pair)
        found.descriptors_quiet = _held(pair)
    port = command.free_port()
    with ranks_on([None, None], port, backend) as pair:
        try:
            pair[0].send("form")
            with clients_on(None, PER_S, port, pair, connections) as counted:
                pair[1].send("form")
                found.forming_s = [rank.figure() for rank in pair][1]
            found.add(counted)
            rates: dict[bool, list[float]] = {False: [], True: []}
            for stretch in command.progress(range(2 * STRETCHES), f"{backend}: flood"):
                decoy, goal = stretch % 2 == 0, connections // STRETCHES
                attacked = (command.free_port(), pair[:0]) if decoy else (port, pair)
                with clients_on(None, PER_S, *attacked, goal) as counted:
                    rates[decoy].append(_rate(pair))
                found.add({} if decoy else counted)
            found.steps_per_s_decoy = statistics.median(rates[True])
            found.steps_per_s = statistics.median(rates[False])
            found.descriptors = _held(pair)
        except RuntimeError as error:  # is reported in the table
            found.error = str(error)
    return found


def _rate(pair: Sequence[Child]) -> float:
    """Steps per second of one stretch."""
    for rank in pair:
        rank.send(f"train {STEPS}")
    rates = [rank.figure() for rank in pair]
    return rates[0]


def _held(pair: Sequence[Child]) -> int:
    """The descriptors of rank 0."""
    pair[0].send("held")
    return int(pair[0].answer()["descriptors"])


def cycles(backend: str, count: int) -> Cycles:
    """Starts and stops; ranks that fail or hang are restarted."""
    found, held = Cycles(backend), list[Held]()  # after each cycle of this rank 0
    port = command.free_port()
    before, begin = _shared_files(), time.monotonic()
    with contextlib.ExitStack() as stack:
        pair: list[Child] = []
        for number in command.progress(range(count), f"{backend}: starts and stops"):
            dies = number % 2
            found.cycles += 1
            try:
                pair = pair or stack.enter_context(ranks_on([None, None], port, backend))
                pair[0].send(f"cycle {dies}")
                pair[1].send(f"forked {dies}")
                if not isinstance(open_ := pair[0].answer(), dict):
                    raise RuntimeError(open_)
                if (code := pair[1].figure()) != -9 * dies:
                    raise RuntimeError(f"rank 1 ended with {code}")
                held.append(open_)
            except RuntimeError as error:  # is counted; another pair continues
                found.failures.append(f"cycle {number}: {str(error)[:200]}")
                stack.close()
                pair, held = [], []
                if len(found.failures) == MOST_FAILURES:
                    break
    found.first = _least(held[WARM_CYCLES : 2 * WARM_CYCLES])
    found.last = _least(held[-WARM_CYCLES:])
    found.seconds = time.monotonic() - begin
    found.files = len(_shared_files() - before)
    return found


def _shared_files() -> set[str]:
    """pycomm's files in /dev/shm; other programs may make some meanwhile."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("pycomm")}


def _least(some: Sequence[Held]) -> Held | None:
    """The least of each count: a socket that still sends its last bytes counts for a while."""
    return {name: min(one[name] for one in some) for name in some[0]} if some else None
