"""`python -m benchmarks connection_flood`: jobs beside hostile connections.

Two ranks with 1,024 descriptors form a group and train while unauthenticated clients connect to
every listener, in each of the manners of unauthenticated.py. Jobs in which the clients connect to
an unused port instead take turns with these, so that both include the processor time of the
clients. The backends are pycomm and gloo. Exits with 1 if pycomm failed, let a client in, leaked a
descriptor, or made less than nine tenths of the steps. The native suite `flood` tests distant
ranks, tests/reliability/test_restart.py restarts on one port.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import resource
import secrets
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np

import pycomm
from benchmarks.support import command
from benchmarks.support.ports import free_port
from benchmarks.support.unauthenticated import (
    UnauthenticatedClients,
    inodes,
    listeners,
    with_descendants,
)

BACKENDS = ("pycomm", "gloo")
PER_S = 2000  # calls of the unauthenticated clients
BURST = 50  # connections between two looks at the open ones
LOOK_S = 0.025  # between two looks for the ports of the ranks
STEPS = 3000  # of a job
JOBS = 5
LEAST_KEPT = 0.9
LIMIT_S = 60.0  # of forming, and of a call
FEW_DESCRIPTORS = 1024
COUNT = 1 << 16  # float32: a gradient of 256 KiB


Rank = tuple[float, float, int]
"""The observations of a rank: seconds of forming, steps a second, descriptors."""


@dataclass
class Flood:
    """The outcome of jobs beside unauthenticated clients; medians, of rank 1, which forms last."""

    backend: str
    connected: int = 0  # connections of unauthenticated clients
    refused: int = 0
    forming_quiet_s: float = -1.0
    forming_s: float = -1.0
    steps_per_s_decoy: float = 0.0
    steps_per_s: float = 0.0
    descriptors_quiet: int = 0
    descriptors: int = 0
    let_in: int = 0  # clients that received more than an unauthenticated client may
    error: str = ""

    def kept(self) -> bool:
        """Whether pycomm did what it guarantees."""
        return self.backend != "pycomm" or (
            not self.error
            and not self.let_in
            and self.descriptors <= self.descriptors_quiet
            and self.steps_per_s >= LEAST_KEPT * self.steps_per_s_decoy
        )


def main(argv: Sequence[str]) -> int:
    """Runs, prints, stores; returns the exit status."""
    parser = command.parser("connection_flood", __doc__, connections=(10_000, "at least"))
    parser.add_argument("--peers", nargs="+", choices=BACKENDS, default=BACKENDS, help="(all)")
    options = parser.parse_args(argv)
    floods = [flood(backend, options.connections) for backend in options.peers]
    command.report(options.json, flood=[asdict(one) for one in floods])
    return 0 if all(one.kept() for one in floods) else 1


def flood(backend: str, connections: int) -> Flood:
    """Runs the jobs, until one fails."""
    found, seen = Flood(backend), dict[bool, list[Rank]]({False: [], True: []})
    try:
        for number in command.progress(range(2 * JOBS), f"{backend}: flood"):
            attacked = number % 2 == 1
            rank, clients = _job(backend, attacked, connections // JOBS)
            seen[attacked].append(rank)
            if attacked:
                found.connected += clients.connected
                found.refused += clients.refused
                found.let_in += clients.let_in
    except RuntimeError as error:  # is reported in the table
        found.error = f"{type(error).__name__}: {error}"
    names = {
        False: ("forming_quiet_s", "steps_per_s_decoy", "descriptors_quiet"),
        True: ("forming_s", "steps_per_s", "descriptors"),
    }
    for attacked, ranks in seen.items():
        if ranks:
            forming_s, steps_per_s, descriptors = zip(*ranks, strict=True)
            median = statistics.median(forming_s), statistics.median(steps_per_s)
            vars(found).update(zip(names[attacked], (*median, max(descriptors)), strict=True))
    return found


def _job(backend: str, attacked: bool, connections: int) -> tuple[Rank, UnauthenticatedClients]:
    """One job: rank 1, which starts when the clients have, and the clients."""
    port, secret = free_port(), secrets.token_hex(32)
    target = port if attacked else free_port()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        first = pool.submit(run_rank, backend, 0, port, secret)
        with _flooded(target, attacked, connections) as clients:
            last = pool.submit(run_rank, backend, 1, port, secret)
            first.result()
            return last.result(), clients


@contextlib.contextmanager
def _flooded(port: int, attacked: bool, least: int) -> Iterator[UnauthenticatedClients]:
    """Clients connect to `port` and, if `attacked`, to the listeners of all child processes, until
    the context ends, and at least so many times. From a tenth of that on the context runs."""
    clients, begun, ended = UnauthenticatedClients(), threading.Event(), threading.Event()
    me = os.getpid()  # holds hundreds of connections, and no listener

    def connect() -> None:
        begin, looked, calls, ports = time.monotonic(), 0.0, 0, [port]
        while calls < least or not ended.is_set():
            if (now := time.monotonic()) - looked > LOOK_S:
                theirs, looked = inodes(with_descendants(me) - {me} if attacked else ()), now
                found = {one.address[1] for inode, one in listeners().items() if inode in theirs}
                ports = sorted({port} | found)
                clients.go_on()
            due = min(int((now - begin) * PER_S), calls + BURST)
            while calls < due:
                clients.call(("127.0.0.1", ports[calls % len(ports)]))
                calls += 1
            if calls >= least // 10:
                begun.set()
            time.sleep(0.0005)  # the next connections are due later: no busy loop
        clients.close()

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(connect)
        done.add_done_callback(lambda _: begun.set())
        begun.wait()
        try:
            yield clients
        finally:
            ended.set()
        done.result()


def run_rank(backend: str, rank: int, port: int, secret: str) -> Rank:
    """A rank, in its own process: some work and an all_reduce in each step."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS))
    torch: Any = None
    dist: Any = None
    x = np.ones(COUNT, np.float32)
    if backend == "gloo":  # importing torch takes seconds
        torch, dist = map(importlib.import_module, ("torch", "torch.distributed"))
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    start, master = time.monotonic(), f"127.0.0.1:{port}"
    if dist:
        place, limit = {"rank": rank, "world_size": 2}, timedelta(seconds=LIMIT_S)
        dist.init_process_group("gloo", f"tcp://{master}", limit, **place)
    else:
        limits: Any = {"timeout_s": LIMIT_S, "heartbeat_s": LIMIT_S}
        pycomm.init(rank=rank, size=2, master=master, transport="tcp", secret=secret, **limits)
    formed = time.monotonic()
    for _ in range(STEPS):
        x[:] = np.sqrt(np.abs(x) + 1.0)
        if torch:
            dist.all_reduce(torch.from_numpy(x), dist.ReduceOp.MAX)
        else:
            pycomm.all_reduce(x, "max")
    rate, descriptors = STEPS / (time.monotonic() - formed), len(os.listdir("/proc/self/fd"))
    (dist.destroy_process_group if dist else pycomm.shutdown)()
    return formed - start, rate, descriptors
