"""The processes of connection_flood.py: ranks that form, train, start and stop (gloo or pycomm),
and an unauthenticated client, which holds no key and sends invalid bytes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import pycomm
from benchmarks.reliability.unauthenticated import KEPT, UnauthenticatedClients, inodes, listeners

FORM_LIMIT_S = 60.0
CALL_LIMIT_S = 20.0
FEW_DESCRIPTORS = 1024
STANDS, TRAIN = "established", "train"
COUNT = 1 << 16  # float32: a gradient of 256 KiB


@dataclass(frozen=True)
class Place:
    """The rendezvous of the ranks of a job."""

    backend: str  # "pycomm" or "gloo"
    port: int
    secret: str


@dataclass(frozen=True)
class Held:
    """The open resources of a process."""

    descriptors: int
    threads: int
    mappings: int

    @classmethod
    def now(cls) -> Held:
        """Those of this process."""
        return cls(
            len(os.listdir("/proc/self/fd")) - 1,  # without the one that reads
            len(os.listdir("/proc/self/task")),
            len(Path("/proc/self/maps").read_text().splitlines()),
        )


class Job:
    """A rank of a group of two, by pycomm (over tcp) or by gloo."""

    def __init__(self, place: Place, rank: int) -> None:
        """Joins. Raises RuntimeError if the group does not form."""
        self._ours, self._x = place.backend == "pycomm", np.ones(COUNT, np.float32)
        if self._ours:
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(place.port),
            }
            pycomm.init(transport="tcp", secret=place.secret, timeout_s=FORM_LIMIT_S)
            return
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{place.port}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=FORM_LIMIT_S),
        )

    def step(self) -> None:
        """Some work and an all_reduce. Raises RuntimeError if it fails."""
        self._x[:] = np.sqrt(np.abs(self._x) + 1.0)
        if self._ours:
            pycomm.all_reduce(self._x, "max")
        else:
            dist.all_reduce(torch.from_numpy(self._x), dist.ReduceOp.MAX)

    def end(self) -> None:
        """Leaves."""
        if self._ours:
            pycomm.shutdown()
        else:
            dist.destroy_process_group()


def train(pipe: Connection, place: Place, rank: int) -> None:
    """Forms with few descriptors, then trains on request and reports steps per second."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS))
    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        job = Job(place, rank)
        pipe.send((STANDS, time.monotonic() - start, Held.now()))
        while True:
            pipe.send((TRAIN, _rate(job, pipe.recv()), Held.now()))
    except RuntimeError as error:
        pipe.send((f"{type(error).__name__}: {error}", time.monotonic() - start, Held.now()))
    except EOFError:  # the parent closed the pipe
        return


def _rate(job: Job, steps: int) -> float:
    """Steps per second."""
    start = time.monotonic()
    for _ in range(steps):
        job.step()
    return steps / (time.monotonic() - start)


def cycle(pipe: Connection, place: Place, rank: int, dies: bool) -> None:
    """One start and stop; rank 1 may be killed in it, which rank 0 has to survive."""
    job = Job(place, rank)
    for _ in range(3):
        job.step()
    if dies and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if dies:
        with contextlib.suppress(RuntimeError):  # PeerLost, or gloo's: the expected error
            while True:
                job.step()
    with contextlib.suppress(RuntimeError if dies else _Nothing):  # gloo waits for the dead
        job.end()
    if rank == 1:
        pipe.close()


class _Nothing(Exception):
    """Never raised."""


def cycles(pipe: Connection, place: Place) -> None:
    """Rank 0 of all cycles, in one process: reports each outcome and the open resources."""
    torch.set_num_threads(1)
    while True:
        order = pipe.recv()
        try:
            cycle(pipe, place, 0, order)
            pipe.send(("", Held.now()))
        except RuntimeError as error:
            pipe.send((f"{type(error).__name__}: {error}", Held.now()))


def be_strange(pipe: Connection, pids: list[int], port: int, decoy: bool) -> None:
    """Connects to `port`, and unless it is a decoy to all other listeners of `pids`, at the given
    rate; then reports the established, refused and accepted connections."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * KEPT,) * 2)
    clients, addresses = UnauthenticatedClients(), {("127.0.0.1", port)}
    goal, per_s = pipe.recv()
    start = time.monotonic()
    while (done := clients.connected + clients.refused) < goal:
        if done % 50 == 0:
            clients.go_on()
            found = set(_listening(pids))  # also for the decoy, at the same cost
            addresses |= set() if decoy else found
        for address in sorted(addresses):
            clients.call(address)
        late = start + (clients.connected + clients.refused) / per_s - time.monotonic()
        time.sleep(max(0.0, late))  # keeps the rate
    clients.go_on()
    clients.close()
    pipe.send((clients.connected, clients.refused, clients.let_in))


def _listening(pids: list[int]) -> Iterator[tuple[str, int]]:
    """The TCP ports at which these processes listen now."""
    theirs = inodes(pids)
    for inode, listener in listeners().items():
        if inode in theirs:
            yield listener.address
