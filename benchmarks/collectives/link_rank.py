"""One rank of links.py, which gives its request on stdin as JSON.

Checks every case, then times the contestants in turn. It writes a line of JSON for each case to
stdout. The ranks use a store on rank 0's host as rendezvous, and start each call together by a
mapped file, as all hosts are on this machine.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs hide it

from benchmarks.collectives import sockets
from pycomm.bench.collectives.peers import ENCRYPTED, OURS, PEERS, Groups
from pycomm.bench.collectives.verbs import VERBS, Arrays, Call, Case
from pycomm.bench.collectives.worker import Barrier

PORT = 29400
TIMEOUT = timedelta(seconds=60)
FAR_CALLS = 4
"""Calls of each case before the first that is measured, until a distant connection has its rate."""


@dataclass(frozen=True)
class Orders:
    """The request of a rank."""

    rank: int
    size: int
    master: str
    address: str  # of this rank's host
    flags: str  # the file of worker.Barrier
    peers: list[str]
    cases: list[tuple[str, int, int, float]]  # verb, bytes, calls of each round, pause_s
    rounds: int
    far: bool  # whether the link has a delay


@dataclass(frozen=True)
class RankTimes:
    """Of one case; `seconds[name][round]` and `cpu_s[name][round]` are lists of single calls."""

    verb: str
    size_bytes: int
    wrong: dict[str, int]
    seconds: dict[str, list[list[float]]]
    cpu_s: dict[str, list[list[float]]]  # of all threads, and of the kernel for them
    pause_s: float = 0.0  # before each call


def main() -> None:
    """Runs the request on stdin."""
    orders = Orders(**json.loads(sys.stdin.readline()))
    torch.set_num_threads(1)
    store = TCPStore(
        orders.master, PORT, is_master=orders.rank == 0, wait_for_workers=False, timeout=TIMEOUT
    )
    known = OURS | PEERS | {ENCRYPTED.name: ENCRYPTED}
    peers = [known[name] for name in orders.peers if name != sockets.NAME]
    groups = Groups(peers, store, orders.rank, orders.size)
    ring = None
    if sockets.NAME in orders.peers:
        ring = sockets.Ring(store, orders.rank, orders.size, orders.address, orders.far)
    barrier = Barrier(Path(orders.flags), orders.rank, orders.size)
    for verb, size_bytes, calls, pause_s in orders.cases:
        arrays = Arrays(Case(verb, "float32", size_bytes, orders.size), orders.rank)
        contestants = {peer.name: groups.call(peer, arrays) for peer in peers}
        times = RankTimes(verb, arrays.case.bytes, {}, {}, {}, pause_s)
        if ring:
            sent = int(arrays.case.bytes * VERBS[verb].bus_factor(orders.size))
            contestants[sockets.NAME] = ring.call(
                memoryview(bytes(sent)), memoryview(bytearray(sent))
            )
        for name, call in contestants.items():
            barrier()
            wrong = arrays.wrong(call)
            times.wrong[name] = wrong if name != sockets.NAME else 0  # it computes nothing
            for _ in range(FAR_CALLS if orders.far else 0):
                barrier()
                call()
            times.seconds[name], times.cpu_s[name] = [], []
        for turn in range(orders.rounds):
            names = list(contestants)
            first = turn % len(names)  # no contestant always follows the same one
            for name in names[first:] + names[:first]:
                seconds, cpu_s = _series(contestants[name], arrays, barrier, (calls, pause_s))
                times.seconds[name].append(seconds)
                times.cpu_s[name].append(cpu_s)
        print(json.dumps(asdict(times)), flush=True)
    barrier()
    dist.destroy_process_group()


def _series(
    call: Call, arrays: Arrays, barrier: Barrier, repeats: tuple[int, float]
) -> tuple[list[float], list[float]]:
    """Seconds and processor seconds of each of so many calls, after one that warms up; before each
    is a pause of so many seconds.
    """
    (calls, pause_s), seconds, cpu_s = repeats, [], []
    gc.disable()
    for _ in range(calls + 1):
        arrays.rewrite()
        if pause_s:
            time.sleep(pause_s)  # the connections are idle, as during a computation
        barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        cpu_s.append(time.process_time() - cpu_start)
        seconds.append(time.perf_counter() - start)
    gc.enable()
    return seconds[1:], cpu_s[1:]


if __name__ == "__main__":
    main()
