"""Distant ranks join a group, and connect to a rank that they have not met, during a flood.

Two hosts in namespaces have a round-trip time between them (delayed_link.py). A process on the
first opens hostile connections to one listener at a given rate:

    store     four ranks form a group, two on each host; the connections are to rank 0's store
    mesh      the same; to the listener of rank 1, which is on the first host too
    mid-run   a rank on the second host sends to ranks of the 65 on the first, to which it has no
              connection yet, one by one; to the listener of the rank that it sends to

Each with hostile connections and without, in turn.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.reliability import command
from benchmarks.reliability.command import Child
from pycomm.bench.support import summaries
from pycomm.bench.support.delayed_link import DelayedLink, Line
from pycomm.bench.support.netns import Host, Network

FLOODS = ((10, 8000), (50, 1500), (100, 800))
"""Milliseconds of a round trip, and hostile connections a second."""
FORMING, MID_RUN = ("store", "mesh"), "mid-run"
PORT = 29500
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


def measure(rounds: int) -> list[DelayedFlood]:
    """All cases, in `rounds` rounds each."""
    found = [DelayedFlood(where, *flood) for where in FORMING for flood in FLOODS]
    for one in command.progress(found, "distant ranks join"):
        for _ in range(rounds):
            for flooded in (False, True):
                _try(one, functools.partial(_form, flooded=flooded))
    later = [DelayedFlood(MID_RUN, *flood) for flood in FLOODS]
    _try(later[0], lambda _: _mid_run(later, rounds))
    return found + later


def _try(one: DelayedFlood, case: Callable[[DelayedFlood], object]) -> None:
    """Runs a case; a failure is reported in the table."""
    try:
        case(one)
    except (RuntimeError, OSError) as error:  # the other cases still run; the table shows it
        one.error = str(error)


@contextlib.contextmanager
def ranks_on(
    hosts: Sequence[Host | None], port: int, backend: str = "pycomm"
) -> Iterator[list[Child]]:
    """A rank on each of these hosts, None for this machine, that has not formed a group yet."""
    address, secret = _address(hosts[0]), secrets.token_hex(32)
    env = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    env |= {"PYCOMM_SECRET": secret, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, host in enumerate(hosts):
            own = {**env, "RANK": str(rank)}
            process = Child("flood_rank", backend, env=own, host=_name(host))
            ranks.append(stack.enter_context(process))
        for one in ranks:
            one.expect("ready")
        yield ranks


@contextlib.contextmanager
def clients_on(
    host: Host | None, per_s: int, port: int, ranks: Sequence[Child], goal: int = 0
) -> Iterator[dict[str, float]]:
    """Clients connect to `port`, 0 for none, and to the listeners of the ranks: `goal` times, or
    if that is 0 until the context ends. Then the yielded dictionary has their counts."""
    words = [str(per_s), str(goal), _address(host), str(port)]
    pids = [str(rank.pid) for rank in ranks]
    counted: dict[str, float] = {}
    with Child("unauthenticated", *words, *pids, host=_name(host)) as process:
        process.expect("in full course")
        yield counted
        process.send("enough")
        counted.update(process.answer())


def _name(host: Host | None) -> str:
    return host.name if host else ""


def _address(host: Host | None) -> str:
    return host.ipv4() if host else "127.0.0.1"


@contextlib.contextmanager
def _two_hosts() -> Iterator[tuple[DelayedLink, Sequence[Host]]]:
    with Network(2, links=0) as net, DelayedLink(net.hosts) as line:
        yield line, net.hosts


def _form(one: DelayedFlood, flooded: bool) -> None:
    with _two_hosts() as (line, (near, far)), ranks_on([near, near, far, far], PORT) as ranks:
        line.set(Line(one.round_trip_ms / 2e3))
        for rank in ranks[:2]:
            rank.send("form")
        attacked = (PORT, ranks[:0]) if one.where == "store" else (0, ranks[1:2])
        with _flooded(one, near, *attacked, flooded):
            for rank in ranks[2:]:
                rank.send("form")
            took = [rank.figure() for rank in ranks]
        (one.flooded_s if flooded else one.quiet_s).append(max(took[2:]))


def _mid_run(found: Sequence[DelayedFlood], rounds: int) -> None:
    with _two_hosts() as (line, (near, far)), ranks_on([near] * NEAR + [far], PORT) as ranks:
        for rank in ranks:
            rank.send("form")
        for rank in ranks:
            rank.figure()
        ranks[-1].send("unmet")
        unmet = [n for n in ranks[-1].answer() if 0 < n < NEAR]  # rank 0 has more listeners
        if len(unmet) < 2 * rounds * len(found):
            raise RuntimeError(f"only {len(unmet)} ranks were not met")
        for one in found:
            line.set(Line(one.round_trip_ms / 2e3))
            for turn in range(2 * rounds):
                met, flooded = unmet.pop(), turn % 2 == 1
                with _flooded(one, near, 0, [ranks[met]], flooded):
                    ranks[met].send(f"answer {NEAR}")
                    ranks[-1].send(f"meet {met}")
                    (one.flooded_s if flooded else one.quiet_s).append(ranks[-1].figure())
                    ranks[met].figure()


@contextlib.contextmanager
def _flooded(
    one: DelayedFlood, host: Host, port: int, ranks: Sequence[Child], flooded: bool
) -> Iterator[None]:
    """Opens hostile connections at the full rate meanwhile, if `flooded`."""
    if not flooded:
        yield
        return
    with clients_on(host, one.per_s, port, ranks) as counted:
        yield
    one.reached_per_s.append(counted["per_s"])
