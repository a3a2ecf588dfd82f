"""Distant ranks join a group, and connect to a rank that they have not met, during a flood.

Two hosts in namespaces have a round-trip time between them (pycomm.bench.support.delayed_link). A
process on the first opens hostile connections to one listener at a given rate:

    store     four ranks form a group, two on each host; the connections are to rank 0's store
    mesh      the same; to the listener of rank 1, which is on the first host too
    mid-run   a rank on the second host sends to ranks of the 65 on the first, to which it has no
              connection yet, one by one; to the listener of the rank that it sends to

Each with hostile connections and without, in turn.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from pycomm.bench.support import summaries
from pycomm.bench.support.delayed_link import DelayedLink, Line
from pycomm.bench.support.netns import Host, Network

FLOODS = ((10, 8000), (50, 1500), (100, 800))
"""Milliseconds of a round trip, and hostile connections a second."""
FORMING, MID_RUN = ("store", "mesh"), "mid-run"
PORT = 29500
CASES = (len(FORMING) + 1) * len(FLOODS)
NEAR = 65  # ranks on the first host in mid-run: enough that the group is not a full mesh
MOST_LATE_S = 2.0  # allowed delay of a distant rank by hostile connections


@dataclass
class DelayedFlood:
    """Seconds that distant ranks took, without and with hostile connections."""

    where: str
    round_trip_ms: int
    per_s: int  # hostile connections asked for
    reached_per_s: list[float] = field(default_factory=list)  # actual rate
    quiet_s: list[float] = field(default_factory=list)
    flooded_s: list[float] = field(default_factory=list)
    error: str = ""

    def summary(self) -> dict[str, Any]:
        """The fields, with a summary in place of the samples."""
        samples = ("reached_per_s", "quiet_s", "flooded_s")
        return asdict(self) | {name: summaries.summarize(getattr(self, name)) for name in samples}

    def kept(self) -> bool:
        """Whether no rank was delayed by more than MOST_LATE_S."""
        late = max(self.flooded_s, default=0.0) - statistics.median(self.quiet_s or [0.0])
        return not self.error and bool(self.flooded_s) and late <= MOST_LATE_S


def measure(rounds: int, advance: Callable[[], None]) -> list[DelayedFlood]:
    """All cases, in `rounds` rounds each; calls `advance` after each of CASES."""
    found = []
    for where in FORMING:
        for round_trip_ms, per_s in FLOODS:
            found.append(DelayedFlood(where, round_trip_ms, per_s))
            for _ in range(rounds):
                _try(found[-1], _form)
            advance()
    found += _mid_run(rounds, advance)
    return found


def _try(one: DelayedFlood, case: Callable[[DelayedFlood], None]) -> None:
    """Runs a case; a failure is reported in the table."""
    try:
        case(one)

    except (RuntimeError, OSError) as error:  # the other cases still run; the table shows it
        one.error = str(error)


def _form(one: DelayedFlood) -> None:
    for flooded in (False, True):
        with Network(2, links=0) as net, DelayedLink(net.hosts) as link:
            link.set(Line(one.round_trip_ms / 2e3))
            ranks = [_Process(net.hosts[i // 2], ["rank"], _place(net, i, 4)) for i in range(4)]
            for rank in ranks:
                rank.expect("ready")
            for rank in ranks[:2]:
                rank.send("go")
                rank.expect("forms")
            called = 0 if one.where == "store" else 1
            with _clients(one, net.hosts[0], ranks[called].pid, 0 if called else PORT, flooded):
                for rank in ranks[2:]:
                    rank.send("go")
                    rank.expect("forms")
                took = [rank.figure() for rank in ranks]
            (one.flooded_s if flooded else one.quiet_s).append(max(took[2:]))


def _mid_run(rounds: int, advance: Callable[[], None]) -> list[DelayedFlood]:
    found = [DelayedFlood(MID_RUN, *flood) for flood in FLOODS]
    with Network(2, links=0) as net, DelayedLink(net.hosts) as link:
        hosts = [net.hosts[0]] * NEAR + [net.hosts[1]]
        ranks = [
            _Process(host, ["rank"], _place(net, rank, len(hosts)))
            for rank, host in enumerate(hosts)
        ]
        far = ranks[-1]
        try:
            for word in ("ready", "forms"):
                for rank in ranks:
                    rank.expect(word)
                    rank.send("go")
            for rank in ranks:
                rank.figure()
            far.send("unmet")
            unmet = [rank for rank in far.answer() if 0 < rank < NEAR]  # rank 0 has more listeners

        except RuntimeError as error:  # no group: no case can run; the table shows it
            found[0].error = str(error)
            return found
        for one in found:
            link.set(Line(one.round_trip_ms / 2e3))
            for _ in range(rounds):
                _try(one, lambda one: _meet(one, net.hosts[0], ranks, unmet))
            advance()
    return found


def _meet(one: DelayedFlood, host: Host, ranks: Sequence[_Process], unmet: list[int]) -> None:
    far = ranks[-1]
    for flooded in (False, True):
        if not unmet:
            raise RuntimeError("no rank is left that was not met")
        met = unmet.pop()
        with _clients(one, host, ranks[met].pid, 0, flooded):
            ranks[met].send(f"answer {len(ranks) - 1}")
            far.send(f"meet {met}")
            took = far.figure()
            ranks[met].expect("answered")
        (one.flooded_s if flooded else one.quiet_s).append(took)


def _place(net: Network, rank: int, size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": net.hosts[0].ipv4(),
        "MASTER_PORT": str(PORT),
        "PYCOMM_SECRET": SECRET,
        "OMP_NUM_THREADS": "1",
    }


SECRET = secrets.token_hex(32)


@contextlib.contextmanager
def _clients(one: DelayedFlood, host: Host, pid: int, port: int, there: bool) -> Iterator[None]:
    """Opens hostile connections at the full rate meanwhile, if `there`."""
    if not there:
        yield
        return
    words = ["client", str(one.per_s), str(pid), str(port), host.ipv4()]
    clients = _Process(host, words, {})
    try:
        clients.expect("in full course")
        yield
        clients.send("enough")
        one.reached_per_s.append(clients.figure())
    finally:
        clients.end()


class _Process:
    """A process of delayed_flood_rank.py on a host."""

    def __init__(self, host: Host, words: Sequence[str], env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks.reliability.delayed_flood_rank", *words]
        self._process = host.start(command, env, stdin=subprocess.PIPE, stderr=None)
        self.pid = self._process.pid  # `ip netns exec` becomes the command

    def send(self, word: str) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process ended: answer() reports it
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """The next answer. Raises RuntimeError if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process ended without an answer")
        return json.loads(line)

    def expect(self, wanted: str) -> None:
        """Waits for this answer. Raises RuntimeError for any other."""
        if (message := self.answer()) != wanted:
            raise RuntimeError(str(message))

    def figure(self) -> float:
        """Waits for a number. Raises RuntimeError for anything else."""
        message = self.answer()
        if not isinstance(message, float):
            raise RuntimeError(str(message))
        return message

    def end(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()


def table(found: Sequence[DelayedFlood]) -> Table:
    """A line for each case."""
    shown = Table()
    for name in ("far ranks", "round trip", "clients", "reached", "alone", "median", "worst", ""):
        shown.add_column(name)
    for one in found:
        times = one.flooded_s or [-1.0]
        shown.add_row(
            one.where,
            f"{one.round_trip_ms} ms",
            f"{one.per_s}/s",
            f"{statistics.median(one.reached_per_s or [0.0]):.0f}/s",
            f"{statistics.median(one.quiet_s or [-1.0]):.3f} s",
            f"{statistics.median(times):.3f} s",
            f"{max(times):.3f} s",
            one.error[:60],
        )
    return shown
