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

import collections
import contextlib
import itertools
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch's stubs hide it
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.utils.data import DataLoader, TensorDataset

import pycomm
import pycomm.torch_backend  # registers the backend
from benchmarks.reliability import command
from benchmarks.reliability.command import Child
from pycomm.bench.support import summaries

BACKENDS = {"pycomm-shm": "shm", "pycomm-tcp": "tcp", "gloo": ""}
"""The transport of pycomm; gloo has tcp."""
MOMENTS = ("inside", "workers", "idle", "group_creation")
CALL_LIMIT_S = 10.0
"""Of a call of gloo: a rank that gets no error waits as long."""
FORM_LIMIT_S = 60.0
ESTABLISHED = "established"
COUNT = 1 << 18  # float32
MOST_WORDS = 240  # stored characters of a survivor's error


@dataclass(frozen=True)
class Job:
    """The parameters of a job for its processes."""

    backend: str  # a key of BACKENDS
    moment: str
    ranks: int
    seed: int


Failure = dict[str, Any]
"""The outcome of one survivor: "backend", "moment", "ranks"; milliseconds from the failure until it
got its error, "noticed_ms", and until the survivors' first call was right, "works_ms" (-1: never);
"text" of the error."""


def main(argv: Sequence[str]) -> int:
    """Kills, prints, stores; returns 1 if a pycomm survivor cannot name the rank."""
    parser = command.parser("rank_failure", __doc__)
    parser.add_argument("--ranks", default="2,4,8", help="in each job (%(default)s)")
    for name, known in (("peers", BACKENDS), ("moments", MOMENTS)):
        names = command.some_of(known)
        parser.add_argument(f"--{name}", type=names, default=",".join(known), help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each kind (%(default)s)")
    options = parser.parse_args(argv)
    ranks = [int(n) for n in options.ranks.split(",")]
    if min(*ranks, options.rounds + 1) < 2:
        parser.error("at least 2 ranks and 1 round are needed")
    kinds = itertools.product(ranks, range(options.rounds), options.moments, options.peers)
    found: list[Failure] = []
    for n, seed, moment, backend in command.progress(list(kinds), "rank failures"):
        found += survivors(Job(backend, moment, n, seed))
    command.report(options.json, rows=summary(found))
    ours = [one for one in found if one["backend"] != "gloo"]
    return 0 if all(_named(one) and one["works_ms"] >= 0 for one in ours) else 1


def _named(one: Failure) -> bool:
    """Whether the text says which rank died."""
    return f"rank {one['ranks'] - 1} " in one["text"]


def summary(found: Sequence[Failure]) -> list[dict[str, Any]]:
    """A row for each backend, moment and number of ranks, with the text of its first survivor."""
    rows = collections.defaultdict(list)
    for one in found:
        rows[one["backend"], one["moment"], one["ranks"]].append(one)
    return [
        {
            **dict(zip(("backend", "moment", "ranks"), key, strict=True)),
            "survivors": len(of),
            "named": sum(map(_named, of)),
            **{
                name: summaries.summarize(one[name] for one in of if one[name] >= 0)
                for name in ("noticed_ms", "works_ms")
            },
            "text": of[0]["text"][:MOST_WORDS],
        }
        for key, of in rows.items()
    ]


def survivors(job: Job) -> list[Failure]:
    """The reports of the survivors of one job. Raises RuntimeError if the group does not form."""
    env = {"WORLD_SIZE": str(job.ranks), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(command.free_port()), "PYCOMM_SECRET": secrets.token_hex(32)}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        children = []
        for rank in range(job.ranks):
            words = ["rank_failure", json.dumps(asdict(job)), folder]
            children.append(stack.enter_context(Child(*words, env={**env, "RANK": str(rank)})))
        for child in children[:-1]:
            child.expect(ESTABLISHED)
        return [_received(job, child) for child in children[:-1]]


def _received(job: Job, child: Child) -> Failure:
    kind = {"backend": job.backend, "moment": job.moment, "ranks": job.ranks}
    try:
        return {**kind, **child.answer(3 * CALL_LIMIT_S)}
    except RuntimeError as error:  # it still waits: reported in the table
        return {**kind, "noticed_ms": -1.0, "works_ms": -1.0, "text": str(error)}


def _rank(job: Job, folder: Path) -> None:
    """A process of the job: the last rank dies."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    rank, died, x = int(os.environ["RANK"]), folder / "died", torch.ones(COUNT)
    group = _form(job, rank, folder)
    dist.all_reduce(x)
    workers = _workers() if job.moment == "workers" else None
    print(json.dumps(ESTABLISHED), flush=True)
    if rank == job.ranks - 1:
        threading.Timer(random.Random(job.seed).uniform(0.0, 0.05), _die, [died]).start()
        if job.moment == "idle":
            signal.pause()  # until the kill
    try:
        while True:
            if job.moment == "group_creation":
                _create_group(group)
            else:
                dist.all_reduce(x)
    except RuntimeError as error:  # the survivors' error, from gloo and pycomm
        noticed_s, text = time.monotonic(), str(error)
    works_s = _continue(group) if group is not None else 0.0
    died_s = float(died.read_text())
    answer = {"noticed_ms": 1e3 * (noticed_s - died_s), "text": text}
    answer["works_ms"] = 1e3 * (works_s - died_s) if works_s else -1.0
    print(json.dumps(answer), flush=True)
    signal.pause()  # an exit would close connections and end the workers
    del workers


def _form(job: Job, rank: int, folder: Path) -> pycomm.Group | None:
    """Joins the job; returns pycomm's group, the one under torch's."""
    limit, transport = timedelta(seconds=FORM_LIMIT_S), BACKENDS[job.backend]
    group = pycomm.init(transport=transport, timeout_s=FORM_LIMIT_S) if transport else None
    store = FileStore(str(folder / "store"), job.ranks)
    backend = "pycomm" if transport else job.backend
    dist.init_process_group(backend, store=store, rank=rank, world_size=job.ranks, timeout=limit)
    if not transport:  # of the calls; pycomm has one limit for both
        _set_pg_timeout(timedelta(seconds=CALL_LIMIT_S))
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


def _create_group(group: pycomm.Group | None) -> None:
    """Makes a group of all, and leaves it."""
    if group is None:
        part = dist.new_group(timeout=timedelta(seconds=CALL_LIMIT_S))
        dist.destroy_process_group(part)
    elif (ours := group.split(0)) is not None:
        ours.close()


def _continue(group: pycomm.Group) -> float:
    """When the survivors' first call gave the right result; 0 if it did not."""
    smaller = group.shrink()
    x = pycomm.all_reduce(np.ones(COUNT, np.float32), group=smaller)
    return time.monotonic() if (x == smaller.size).all() else 0.0


def _die(file: Path) -> None:
    file.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _rank(Job(**json.loads(sys.argv[1])), Path(sys.argv[2]))
