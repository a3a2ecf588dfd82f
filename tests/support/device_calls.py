"""The host time of a call with device arrays: emulated devices, a fake NCCL.

    PYTHONPATH=tests/emulator python tests/support/device_calls.py --json FILE

Each rank is a process. Its device is blocked by a gate in the caller's stream while a call is
timed, and the ranks begin together. The time therefore includes Python, the agreement of the ranks
in host memory, the engine and all that it enqueues. It excludes the host time of the driver and of
NCCL, but includes that of their stand-ins; for zero elements nothing is enqueued. The counts are
those of the fake NCCL. With `--device cuda` it runs on the GPUs of this machine, without counts.

It is here and not in benchmarks/, because its devices are those of the tests (group_devices.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from group_devices import Machine, programs
from rich.progress import Progress

import pycomm
from pycomm._tables import Table, console
from pycomm.bench.support import summaries

__all__ = ["CALLS", "Cost", "main", "programs"]

LIMIT_S = 300.0  # of the calls of one number of ranks
BYTES = 1 << 20
SIZES = (2,)  # more ranks than cores wait for each other
CALLS = (  # verb, algorithm, bytes, and cuda_agreement of the group
    ("all_reduce", "nccl", 0, "before"),
    ("all_reduce", "nccl", BYTES, "before"),
    ("all_reduce", "ring", BYTES, "before"),
    ("all_reduce", "tree", BYTES, "before"),
    ("all_reduce", "hierarchical", BYTES, "before"),
    ("broadcast", "nccl", BYTES, "before"),
    ("broadcast", "ring", BYTES, "before"),
    ("all_gather", "nccl", BYTES, "before"),
    ("all_gather", "ring", BYTES, "before"),
    ("send and recv", None, BYTES, "before"),
    # Last: the fake NCCL counts for the group that was connected last.
    ("all_reduce", "nccl", 0, "after"),
    ("all_reduce", "nccl", BYTES, "after"),
)


@dataclass(frozen=True)
class Cost:
    """A call of one rank: the median over rounds and ranks, and the operations given to NCCL."""

    ranks: int
    verb: str
    algorithm: str | None
    bytes: int
    agreement: str
    host_us: float
    low_us: float  # first quartile
    high_us: float  # third quartile
    groups: int | None  # number of sends and receives; None: not counted
    sends: int | None
    collectives: int | None


def call(group: pycomm.Group, verb: str, algorithm: str | None, x: Any, out: Any) -> None:
    """One collective, or a message from each even rank to the next."""
    rank, size = group.rank, group.size
    if verb == "all_reduce":
        pycomm.all_reduce(x, algorithm=algorithm, group=group)
    elif verb == "broadcast":
        pycomm.broadcast(x, src=0, algorithm=algorithm, group=group)
    elif verb == "all_gather":
        pycomm.all_gather(x, out, algorithm=algorithm, group=group)
    elif rank % 2 == 0 and rank + 1 < size:
        pycomm.send(x, rank + 1, group=group)
    elif rank % 2 == 1:
        pycomm.recv(x, rank - 1, group=group)


def time_calls(group: pycomm.Group, device: Any, rounds: int) -> list[tuple[list[int], Any]]:
    """In a rank: for each of CALLS the nanoseconds of every round, and the counts of the last."""
    found = []
    after = group.split(0)
    assert after is not None
    after.cuda_agreement = "after"
    for verb, algorithm, nbytes, agreement in CALLS:
        used = after if agreement == "after" else group
        count = nbytes // 4
        x = device.put(np.ones(count, np.float32))
        out = device.empty((group.size, count), "float32") if verb == "all_gather" else None
        call(used, verb, algorithm, x, out)
        device.get(x)
        times, counts = [], None
        for _ in range(rounds):
            if device.name == "emulated":
                device.counts()
            let_go = device.delay()
            pycomm.barrier()
            begin = time.perf_counter_ns()
            call(used, verb, algorithm, x, out)
            times.append(time.perf_counter_ns() - begin)
            let_go()
            device.get(x)
            counts = device.counts() if device.name == "emulated" else None
        found.append((times, counts))
    return found


def measure(kind: str, sizes: Sequence[int], rounds: int) -> Iterator[list[Cost]]:
    """The costs with each number of ranks, one after the other."""
    with Machine(kind) as machine:
        for ranks in sizes:
            options = {"processes": True, "transport": "", "timeout_s": LIMIT_S}
            by_rank = machine.run(ranks, time_calls, rounds, **options)
            yield [cost_of(ranks, i, [found[i] for found in by_rank]) for i in range(len(CALLS))]


def cost_of(ranks: int, i: int, found: list[tuple[list[int], Any]]) -> Cost:
    """The cost of CALLS[i] from the results of all ranks."""
    low, median, high = statistics.quantiles([t / 1e3 for times, _ in found for t in times], n=4)
    counts = found[0][1] or {}
    given = (counts.get(name) for name in ("groups", "sends", "collectives"))
    return Cost(ranks, *CALLS[i], median, low, high, *given)


HEADS = {"ranks": ">", "call": "<", "bytes": ">", "host, us": ">"}
HEADS |= {"groups": ">", "sends": ">", "NCCL's own": ">"}


def cells(cost: Cost) -> list[str]:
    """A row of the table. A value that is not counted is empty."""
    name = f"{cost.verb}, {cost.algorithm}" if cost.algorithm else cost.verb
    time_ = f"{cost.host_us:.0f} ({cost.low_us:.0f} to {cost.high_us:.0f})"
    counts = (cost.groups, cost.sends, cost.collectives)
    counted = ("" if n is None else str(n) for n in counts)
    name += ", agrees after" if cost.agreement == "after" else ""
    return [str(cost.ranks), name, f"{cost.bytes:,}", time_, *counted]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("emulated", "cuda"), default="emulated")
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="how many (2)")
    parser.add_argument("--rounds", type=int, default=200, help="calls of each row (200)")
    parser.add_argument("--json", type=Path, help="where to store what was found")
    args = parser.parse_args(argv)
    costs: list[Cost] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("ranks call", total=len(args.ranks))
        for some in measure(args.device, args.ranks, args.rounds):
            costs += some
            progress.advance(task)
    table = Table(HEADS)
    for cost in costs:
        table.add(*cells(cost))
    console().print(table)
    stored = [asdict(cost) for cost in costs]
    summaries.store(args.json, device=args.device, rounds=args.rounds, costs=stored)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
