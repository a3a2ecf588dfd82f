"""`python -m benchmarks rank_failure`: detection of a killed rank, by pycomm and gloo.

Processes of a torch.distributed job make one all_reduce after another, the last rank kills itself
by SIGKILL at a random moment, and the others report the error and its time. With pycomm they then
shrink the group, and report when their first call without the dead rank gave the right sum. The
backends take turns.

    inside     the rank makes the calls too
    workers    the same, and each rank has two DataLoader workers: forked processes, which outlive
               it by seconds and hold copies of what it had open
    idle       it has stopped calling; the others wait for it in one
    group_creation

               instead of calls, all ranks make one group after another (split(), gloo's by
               new_group()): the rank nearly always dies while one forms
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import os
import random
import secrets
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch's stubs hide it
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.utils.data import DataLoader, TensorDataset

import pycomm
import pycomm.torch_backend  # registers the backend
from benchmarks.reliability import rank_failure_plot
from pycomm.bench.support import machine, summaries

BACKENDS = {"pycomm-shm": "shm", "pycomm-tcp": "tcp", "gloo": ""}
"""The transport of pycomm; gloo has tcp."""
MOMENTS = ("inside", "workers", "idle", "group_creation")
CALL_LIMIT_S = 10.0
"""Of a call of gloo: a rank that gets no error waits as long."""
FORM_LIMIT_S = 60.0
STANDS = "established"
COUNT = 1 << 18  # float32
WIDTH = 120  # of the table
MOST_WORDS = 240  # stored characters of a survivor's error


@dataclass(frozen=True)
class RankFailure:
    """The outcome of one survivor; -1 ms if it got no error, or cannot continue."""

    backend: str  # a key of BACKENDS
    moment: str
    ranks: int
    noticed_ms: float  # from the failure
    works_ms: float  # from the failure until the survivors' first call was right
    named: bool  # the text says which rank died
    text: str


@dataclass(frozen=True)
class Kind:
    """The parameters of a job for its processes."""

    backend: str
    moment: str
    ranks: int
    folder: str  # for their shared files
    seed: int
    secret: str
    port: int

    def failure(self, noticed_ms: float, works_ms: float, text: str) -> RankFailure:
        """The outcome of a survivor."""
        named = f"rank {self.ranks - 1} " in text
        return RankFailure(
            self.backend, self.moment, self.ranks, noticed_ms, works_ms, named, text[:MOST_WORDS]
        )


def main(argv: Sequence[str]) -> int:
    """Kills, prints, stores; returns 1 if a pycomm survivor cannot name the rank."""
    parser = argparse.ArgumentParser(prog="pycomm bench rank_failure", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", default="2,4,8", help="in each job (%(default)s)")
    parser.add_argument("--peers", default=",".join(BACKENDS), help="backends (%(default)s)")
    parser.add_argument("--moments", default=",".join(MOMENTS), help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each kind (%(default)s)")
    parser.add_argument("--json", type=Path, help="where to store the times")
    parser.add_argument("--plot", type=Path, help="where to draw it (.png, .svg)")
    options = parser.parse_args(argv)
    ranks, peers = [int(n) for n in options.ranks.split(",")], options.peers.split(",")
    if min(*ranks, options.rounds + 1) < 2:
        parser.error("at least 2 ranks and 1 round are needed")
    moments = options.moments.split(",")
    for name, chosen, known in (("peers", peers, BACKENDS), ("moments", moments, MOMENTS)):
        if bad := [word for word in chosen if word not in known]:
            parser.error(f"no {bad[0]!r}: --{name} takes some of {', '.join(known)}")
    console = Console(width=WIDTH, highlight=False)
    found: list[RankFailure] = []
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        kinds = list(itertools.product(ranks, range(options.rounds), moments, peers))
        for n, seed, moment, backend in bar.track(kinds, description="rank failures"):
            found += job(backend, moment, n, seed)
    console.print(_table(found))
    if options.json:
        content = {"machine": machine.describe(), "rows": summary(found)}
        summaries.write(options.json, content)
    if options.plot:
        rank_failure_plot.save(options.plot, [asdict(failure) for failure in found])
    ours = [failure for failure in found if failure.backend != "gloo"]
    return 0 if all(failure.named and failure.works_ms >= 0 for failure in ours) else 1


def summary(found: Sequence[RankFailure]) -> list[dict[str, Any]]:
    """A row for each backend, moment and number of ranks, with the text of its first survivor."""
    rows: dict[tuple[str, str, int], list[RankFailure]] = {}
    for failure in found:
        key = (failure.backend, failure.moment, failure.ranks)
        rows.setdefault(key, []).append(failure)
    return [
        {
            "backend": backend,
            "moment": moment,
            "ranks": ranks,
            "survivors": len(of),
            "named": sum(failure.named for failure in of),
            "noticed_ms": summaries.summarize(f.noticed_ms for f in of if f.noticed_ms >= 0),
            "works_ms": summaries.summarize(f.works_ms for f in of if f.works_ms >= 0),
            "text": of[0].text,
        }
        for (backend, moment, ranks), of in rows.items()
    ]


def _table(found: Sequence[RankFailure]) -> Table:
    """A line for each backend with each number of ranks."""
    shown = Table()
    for name in ("backend", "moment"):
        shown.add_column(name)
    for name in ("ranks", "survivors", "named", "median ms", "worst", "works ms", "worst"):
        shown.add_column(name, justify="right")
    for key in sorted({(failure.backend, failure.moment, failure.ranks) for failure in found}):
        of = [
            failure for failure in found if (failure.backend, failure.moment, failure.ranks) == key
        ]
        shown.add_row(
            *map(str, key),
            str(len(of)),
            str(sum(failure.named for failure in of)),
            *_middle_and_worst([failure.noticed_ms for failure in of]),
            *_middle_and_worst([failure.works_ms for failure in of]),
        )
    return shown


def _middle_and_worst(times_ms: Sequence[float]) -> tuple[str, str]:
    detected = [time_ms for time_ms in times_ms if time_ms >= 0]
    if not detected:
        return "", "never"
    worst = f"{max(detected):.1f}" if len(detected) == len(times_ms) else "never"
    return f"{statistics.median(detected):.1f}", worst


def job(backend: str, moment: str, ranks: int, seed: int) -> list[RankFailure]:
    """The reports of the survivors of one job."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        kind = Kind(backend, moment, ranks, folder, seed, secrets.token_hex(32), _free_port())
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [  # a daemon is allowed no workers
            context.Process(target=_rank, args=(way_out, kind, rank), daemon=moment != "workers")
            for rank, (_, way_out) in enumerate(pipes)
        ]
        try:
            for process, (_, way_out) in zip(processes, pipes, strict=True):
                process.start()
                way_out.close()
            return [_receive(way_in, kind) for way_in, _ in pipes[:-1]]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _free_port() -> int:
    """A free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _receive(way_in: Connection, kind: Kind) -> RankFailure:
    """A survivor's report. Raises RuntimeError if its group did not form."""
    try:
        if way_in.poll(FORM_LIMIT_S) and way_in.recv() == STANDS:
            if not way_in.poll(3 * CALL_LIMIT_S):
                return kind.failure(-1.0, -1.0, "it still waits")
            failure: RankFailure = way_in.recv()
            return failure
    except EOFError:  # a rank ended before its report
        pass
    raise RuntimeError(f"{kind.ranks} processes did not form a group of {kind.backend}")


def _rank(way_out: Connection, kind: Kind, rank: int) -> None:
    """A process of the job: the last rank dies."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    died = Path(kind.folder, "died")
    x = torch.ones(COUNT)
    group = _form(kind, rank)
    dist.all_reduce(x)
    workers = _workers() if kind.moment == "workers" else None
    way_out.send(STANDS)
    if rank == kind.ranks - 1:
        threading.Timer(random.Random(kind.seed).uniform(0.0, 0.05), _die, [died]).start()
        if kind.moment == "idle":
            signal.pause()  # until the kill
    try:
        while True:
            if kind.moment == "group_creation":
                _part(group)
            else:
                dist.all_reduce(x)
    except RuntimeError as error:  # the survivors' error, from gloo and pycomm
        noticed_s, text = time.monotonic(), str(error)
    works_s = _go_on(group) if group is not None else -1.0
    failed_s = float(died.read_text())
    works_ms = 1e3 * (works_s - failed_s) if works_s >= 0 else -1.0
    way_out.send(kind.failure(1e3 * (noticed_s - failed_s), works_ms, text))
    way_out.close()
    signal.pause()  # an exit would close connections and end the workers
    del workers


def _form(kind: Kind, rank: int) -> pycomm.Group | None:
    """Joins the job; returns pycomm's group, the one under torch's."""
    limit, transport = timedelta(seconds=CALL_LIMIT_S), BACKENDS[kind.backend]
    group = None
    if transport:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(kind.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(kind.port),
        }
        group = pycomm.init(transport=transport, secret=kind.secret, timeout_s=FORM_LIMIT_S)
    backend = "pycomm" if transport else kind.backend
    store = FileStore(str(Path(kind.folder, "store")), kind.ranks)
    form_limit = timedelta(seconds=FORM_LIMIT_S)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=kind.ranks, timeout=form_limit
    )
    if not transport:  # of the calls; pycomm has one limit for both
        _set_pg_timeout(limit)
    return group


def _workers() -> Iterator[torch.Tensor]:
    """The iterator of a started loader: two processes, which live as long as it."""
    loader = DataLoader(
        TensorDataset(torch.ones(1000)),
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    next(batches)
    return batches


def _part(group: pycomm.Group | None) -> None:
    """Makes a group of all, and leaves it."""
    if group is None:
        part = dist.new_group(timeout=timedelta(seconds=CALL_LIMIT_S))
        dist.destroy_process_group(part)
    elif (ours := group.split(0)) is not None:
        ours.close()


def _go_on(group: pycomm.Group) -> float:
    """When the survivors' first call gave the right result; -1 if it did not."""
    smaller = group.shrink()
    x = pycomm.all_reduce(np.ones(COUNT, np.float32), group=smaller)
    return time.monotonic() if (x == smaller.size).all() else -1.0


def _die(file: Path) -> None:
    file.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
