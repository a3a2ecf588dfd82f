"""`python -m benchmarks deaths`: a rank is killed; when do the others know, and whom? Beside gloo.

Processes of a torch.distributed job make one all_reduce after another, the last rank ends itself by
SIGKILL at a random moment, and the others tell what was raised and when. The backends take turns.

main() is called by benchmarks.__main__, pycomm.__main__ and `make faults`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch's stubs hide it

import pycomm.torch_backend  # noqa: F401 - registers the backend
from pycomm.demo import machine

CALL_LIMIT_S = 10.0
"""Of a call: who is told nothing waits as long."""
FORM_LIMIT_S = 60.0
STANDS = "stands"
COUNT = 1 << 18  # float32


@dataclass(frozen=True)
class Death:
    """What one survivor met; -1 ms where it met nothing."""

    backend: str
    ranks: int
    noticed_ms: float
    named: bool  # the text says which rank died
    text: str


def main(argv: Sequence[str]) -> int:
    """Kills, prints, stores; the exit status: 1 where a survivor of pycomm's did not know whom."""
    parser = argparse.ArgumentParser(prog="pycomm bench deaths", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", default="2,4,8", help="in each job (%(default)s)")
    parser.add_argument("--peers", default="pycomm,gloo", help="backends (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each kind (%(default)s)")
    parser.add_argument("--json", type=Path, help="where to store what every survivor said")
    options = parser.parse_args(argv)
    ranks, peers = [int(n) for n in options.ranks.split(",")], options.peers.split(",")
    if min(*ranks, options.rounds + 1) < 2:
        parser.error("at least 2 ranks and 1 round are needed")
    console = Console(soft_wrap=True, highlight=False)
    found: list[Death] = []
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=options.rounds * len(ranks) * len(peers))
        for n in ranks:
            for seed in range(options.rounds):
                for backend in peers:
                    bar.update(task, description=f"{backend}, {n} ranks")
                    found += job(backend, n, seed)
                    bar.advance(task)
    console.print(_table(found))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine.describe(), "rows": [asdict(death) for death in found]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(death.named for death in found if death.backend == "pycomm") else 1


def _table(found: Sequence[Death]) -> Table:
    """A line for each backend with each number of ranks."""
    shown = Table()
    for name in ("ranks", "backend", "survivors", "told who died", "median ms", "worst ms"):
        shown.add_column(name, justify="left" if name == "backend" else "right")
    for ranks, backend in sorted({(death.ranks, death.backend) for death in found}):
        of = [death for death in found if (death.ranks, death.backend) == (ranks, backend)]
        times = [death.noticed_ms for death in of if death.noticed_ms >= 0]
        shown.add_row(
            str(ranks),
            backend,
            str(len(of)),
            str(sum(death.named for death in of)),
            f"{statistics.median(times):.1f}" if times else "",
            f"{max(times):.1f}" if len(times) == len(of) else "never",
        )
    return shown


def job(backend: str, ranks: int, seed: int) -> list[Death]:
    """The survivors' words of one job."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(
                target=_rank, args=(way_out, backend, rank, ranks, folder, seed), daemon=True
            )
            for rank, (_, way_out) in enumerate(pipes)
        ]
        for process, (_, way_out) in zip(processes, pipes, strict=True):
            process.start()
            way_out.close()
        found = [_heard(way_in, backend, ranks) for way_in, _ in pipes[:-1]]
        for process in processes:
            process.kill()
            process.join()
    return found


def _heard(way_in: Connection, backend: str, ranks: int) -> Death:
    """A survivor's word. Raises RuntimeError where it never got as far as a group."""
    try:
        if way_in.poll(FORM_LIMIT_S) and way_in.recv() == STANDS:
            if not way_in.poll(3 * CALL_LIMIT_S):
                return Death(backend, ranks, -1.0, False, "it still waits")
            told: Death = way_in.recv()
            return told
    except EOFError:  # a rank ended before it had told
        pass
    raise RuntimeError(f"{ranks} processes did not form a group of {backend}")


def _rank(way_out: Connection, backend: str, rank: int, ranks: int, folder: str, seed: int) -> None:
    """A process: the last rank is the one that dies."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit = timedelta(seconds=CALL_LIMIT_S)
    store = FileStore(str(Path(folder, "store")), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    x = torch.ones(COUNT)
    dist.all_reduce(x)
    way_out.send(STANDS)
    died = Path(folder, "died")
    if rank == ranks - 1:
        threading.Timer(random.Random(seed).uniform(0.0, 0.05), _die, [died]).start()
    try:
        while True:
            dist.all_reduce(x)
    except RuntimeError as error:
        noticed = time.monotonic()
        text = str(error)
        named = f"rank {ranks - 1} " in text
        way_out.send(
            Death(backend, ranks, 1e3 * (noticed - float(died.read_text())), named, text[:300])
        )
        way_out.close()
    signal.pause()  # an exit would tell the others


def _die(told: Path) -> None:
    told.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
