"""`python -m benchmarks rank_failure`: detection of a killed rank, by pycomm and gloo.

Ranks of a torch.distributed job make one all_reduce after another, the last rank kills itself by
SIGKILL at a random moment, and the others report the error and its time. With pycomm they then
shrink the group, and report when their first call without the dead rank gave the right sum. The
backends take turns. An idle group of pycomm exists in gloo's jobs too: survivors meet in it before
they exit, since an exit closes connections, by which the others would notice.
"""

from __future__ import annotations

import collections
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch's stubs hide it
from torch.distributed.distributed_c10d import _set_pg_timeout

import pycomm
import pycomm.torch_backend  # registers the backend
from benchmarks.support import command
from pycomm import Group
from pycomm.bench.support import summaries
from pycomm.testing import run_ranks

BACKENDS = {"pycomm-shm": "shm", "pycomm-tcp": "tcp", "gloo": "tcp"}
"""The transport of pycomm's group."""
CALL_LIMIT_S = 10.0
"""Of a call of gloo: a rank that gets no error waits as long."""
FORM_LIMIT_S = 60.0
COUNT = 1 << 18  # float32
MOST_WORDS = 240  # stored characters of a survivor's error

Failure = dict[str, Any]
"""The outcome of one survivor: milliseconds from the failure until it got its error, "noticed_ms",
and until the survivors' first call was right, "works_ms" (-1: never); "text" of the error."""


def main(argv: Sequence[str]) -> int:
    """Kills, prints, stores; returns 1 if a pycomm survivor cannot name the rank."""
    parser = command.parser("rank_failure", __doc__, rounds=(5, "jobs of each kind"))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8], help="(%(default)s)")
    parser.add_argument("--peers", nargs="+", choices=BACKENDS, default=BACKENDS, help="(all)")
    options = parser.parse_args(argv)
    found: dict[tuple[str, int], list[Failure]] = collections.defaultdict(list)
    kinds = [(b, n) for n in options.ranks for _ in range(options.rounds) for b in options.peers]
    for number, (backend, ranks) in enumerate(command.progress(kinds, "rank failures")):
        found[backend, ranks] += survivors(backend, ranks, number)
    rows = [
        {
            "backend": backend,
            "ranks": ranks,
            "survivors": len(of),
            "named": sum(f"rank {ranks - 1} " in one["text"] for one in of),
            **{
                name: summaries.summarize(one[name] for one in of if one[name] >= 0)
                for name in ("noticed_ms", "works_ms")
            },
            "text": of[0]["text"][:MOST_WORDS],
        }
        for (backend, ranks), of in found.items()
    ]
    command.report(options.json, rows=rows)
    ours = [row for row in rows if row["backend"] != "gloo"]
    return 0 if all(r["named"] == r["works_ms"]["count"] == r["survivors"] for r in ours) else 1


def survivors(backend: str, ranks: int, seed: int) -> list[Failure]:
    """The reports of the survivors of one job."""
    with tempfile.TemporaryDirectory() as folder:
        seen = run_ranks(
            ranks,
            _rank,
            backend,
            seed,
            folder,
            transport=BACKENDS[backend],
            processes=True,
            timeout_s=FORM_LIMIT_S,
            exit_timeout_s=FORM_LIMIT_S,
            return_exceptions=True,
        )
    failed = {"noticed_ms": -1.0, "works_ms": -1.0}  # it still waits, or could not continue
    return [one if isinstance(one, dict) else {**failed, "text": str(one)} for one in seen[:-1]]


def _rank(group: Group, backend: str, seed: int, folder: str) -> Failure:
    """A process of the job: the last rank dies."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    ours, died, x = backend != "gloo", Path(folder, "died"), torch.ones(COUNT)
    dist.init_process_group(
        "pycomm" if ours else "gloo",
        store=FileStore(f"{folder}/store", group.size),
        rank=group.rank,
        world_size=group.size,
        timeout=timedelta(seconds=FORM_LIMIT_S),
    )
    if not ours:  # of the calls; pycomm has one limit for both
        _set_pg_timeout(timedelta(seconds=CALL_LIMIT_S))
    dist.all_reduce(x)
    if group.rank == group.size - 1:
        threading.Timer(random.Random(seed).uniform(0.0, 0.05), _die, [died]).start()
    try:
        while True:
            dist.all_reduce(x)
    except RuntimeError as error:  # the survivors' error, from gloo and pycomm
        noticed_s, text = time.monotonic(), str(error)
    smaller = group.shrink()
    y = pycomm.all_reduce(np.ones(COUNT, np.float32), group=smaller)
    works_s, right = time.monotonic(), bool((y == smaller.size).all())
    pycomm.barrier(group=smaller)
    died_s = float(died.read_text())
    works_ms = 1e3 * (works_s - died_s) if ours and right else -1.0
    return {"noticed_ms": 1e3 * (noticed_s - died_s), "works_ms": works_ms, "text": text}


def _die(file: Path) -> None:
    file.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
