"""`python -m benchmarks gloo_failures`: what a program that uses gloo gets to know of a failure,
with gloo and with pycomm in its place.

Each job is a program of three processes that asks torch for gloo and makes calls; in pycomm's jobs
PYCOMM_REPLACE=gloo is set. Then the last rank fails in one of four ways:

    skipped call   it leaves out an all_reduce and makes the next call
    another size   it passes half as many elements
    dead           it kills itself by SIGKILL
    stopped        it stops itself by SIGSTOP

`seconds` is when the last of the other ranks knew, and `named` how many of their errors name the
rank. A rank "knows" if a call raised or ended its process. Calls have a time limit of --limit
seconds; torch's default is 1,800.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks.reliability.elastic_ranks import LIMIT_S, Child
from benchmarks.support import command
from benchmarks.support.ports import free_port
from pycomm import torch_backend
from pycomm.errors import InvalidArgument

SIZE, COUNT = 3, 1 << 12
VICTIM = SIZE - 1
BACKENDS = {"gloo": {}, "pycomm": {"PYCOMM_REPLACE": "gloo"}}
NO_ERROR = "no error: the calls of the ranks were paired wrongly"
MOST_CHARACTERS = 200  # stored of an error

Report = tuple[float, str]


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns 1 if a rank with pycomm does not name the failed rank."""
    parser = command.parser("gloo_failures", __doc__, limit=(30.0, "seconds of a call"))
    command.add_names(parser, "failures", FAILURES, FAILURES)
    command.add_names(parser, "peers", BACKENDS, BACKENDS)
    options = parser.parse_args(argv)
    jobs = [(failure, backend) for failure in options.failures for backend in options.peers]
    rows = []
    for failure, backend in command.progress(jobs, "failures"):
        seen = reports(failure, backend, options.limit)
        last = max(seen)
        rows.append(
            {
                "failure": failure,
                "backend": backend,
                "seconds": last[0],
                "knew": sum(text != NO_ERROR for _, text in seen),
                "named": sum(f"rank {VICTIM}" in text for _, text in seen),
                "ranks": len(seen),
                "text": re.sub(r"^\[/\S+\] ", "", last[1])[:MOST_CHARACTERS],  # gloo's files
            }
        )
    command.report(options.json, rows=rows, limit_s=options.limit)
    ours = [row for row in rows if row["backend"] == "pycomm"]
    return 0 if all(row["knew"] == row["named"] == row["ranks"] for row in ours) else 1


def reports(failure: str, backend: str, limit_s: float) -> list[Report]:
    """The seconds until each rank but the failed one knew, and its error."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    with _environment(BACKENDS[backend]):
        children = [
            Child(context, _rank, rank, port, failure, backend, limit_s) for rank in range(SIZE)
        ]
    try:
        for child in children:
            child.receive("ready")
        begin_s = time.monotonic()
        for child in children:
            child.pipe.send("go")
        return [_report(child, begin_s, limit_s) for child in children[:VICTIM]]
    finally:
        for child in children:
            child.end()


def _report(child: Child, begin_s: float, limit_s: float) -> Report:
    try:
        end_s, text = child.receive("end", LIMIT_S + limit_s)
    except EOFError:  # the process ended
        child.process.join(LIMIT_S)
        end_s, text = time.monotonic(), f"the process ended with status {child.process.exitcode}"
    return end_s - begin_s, text


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets these variables for the processes that start meanwhile."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def _rank(
    pipe: Connection, rank: int, port: int, failure: str, backend: str, limit_s: float
) -> None:
    limit = timedelta(seconds=limit_s)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", limit, world_size=SIZE, rank=rank)
    dist.barrier()
    assert (_in_place() is not None) == (backend == "pycomm"), "another backend made the group"
    pipe.send(("ready", None))
    pipe.recv()
    text = NO_ERROR
    try:
        FAILURES[failure](rank == VICTIM)
    except RuntimeError as error:  # of gloo or pycomm: reported
        text = str(error)
    pipe.send(("end", (time.monotonic(), text)))
    pipe.recv()  # an exit would close connections, by which others notice


def _in_place() -> float | None:
    """How many groups are in place of gloo's; None if torch's gloo made this one."""
    try:
        return torch_backend.stats().get("groups_in_place_of_gloo")
    except InvalidArgument:  # the group has another backend
        return None


def _program(skips: bool = False, count: int = COUNT) -> None:
    if not skips:
        dist.all_reduce(torch.ones(count))
    dist.broadcast(torch.ones(COUNT), 0)
    dist.barrier()


def _signalled(number: int) -> Callable[[bool], None]:
    def run(fails: bool) -> None:
        if fails:
            os.kill(os.getpid(), number)
        while True:
            _program()

    return run


FAILURES: dict[str, Callable[[bool], None]] = {
    "skipped call": lambda fails: _program(skips=fails),
    "another size": lambda fails: _program(count=COUNT // (1 + fails)),
    "dead": _signalled(signal.SIGKILL),
    "stopped": _signalled(signal.SIGSTOP),
}
