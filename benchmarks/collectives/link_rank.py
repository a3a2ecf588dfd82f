"""One rank of links.py: checks every case, then times the contestants in turn. The ranks start each
call together by a mapped file, as all hosts are on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.collectives import sockets
from pycomm.bench.collectives.cases import VERBS, Case
from pycomm.bench.collectives.groups import Groups
from pycomm.bench.collectives.peers import ENCRYPTED, OURS, PEERS
from pycomm.bench.collectives.verbs import Arrays
from pycomm.bench.collectives.worker import Barrier, timed, turns
from pycomm.bench.support.processes import Rank

FAR_CALLS = 4
"""Calls of each case before the first that is measured, until a distant connection has its rate."""


@dataclass(frozen=True)
class Request:
    """What all ranks measure."""

    flags: Path  # the file of worker.Barrier
    addresses: Sequence[str]  # of the ranks' hosts
    peers: Sequence[str]
    cases: Sequence[tuple[str, int, int, float]]  # verb, bytes, calls of each round, pause_s
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


def work(rank: Rank, request: Request) -> None:
    """Reports a RankTimes for each case."""
    torch.set_num_threads(1)
    known = OURS | PEERS | {ENCRYPTED.name: ENCRYPTED}
    peers = [known[name] for name in request.peers if name != sockets.NAME]
    groups = Groups(peers, rank.store, rank.rank, rank.size)
    ring = None
    if sockets.NAME in request.peers:
        address = request.addresses[rank.rank]
        ring = sockets.Ring(rank.store, rank.rank, rank.size, address, request.far)
    barrier = Barrier(request.flags, rank.rank, rank.size)
    for verb, size_bytes, calls, pause_s in request.cases:
        arrays = Arrays(Case(verb, "float32", size_bytes, rank.size), rank.rank)
        contestants = {peer.name: groups.call(peer, arrays) for peer in peers}
        times = RankTimes(verb, arrays.case.bytes, {}, {}, {}, pause_s)
        if ring:
            sent = int(arrays.case.bytes * VERBS[verb].bus_factor(rank.size))
            contestants[sockets.NAME] = ring.call(
                memoryview(bytes(sent)), memoryview(bytearray(sent))
            )
        for name, call in contestants.items():
            barrier()
            wrong = arrays.wrong(call)
            times.wrong[name] = wrong if name != sockets.NAME else 0  # it computes nothing
            for _ in range(FAR_CALLS if request.far else 0):
                barrier()
                call()
            times.seconds[name], times.cpu_s[name] = [], []
        for name in turns(list(contestants), request.rounds):
            call = contestants[name]
            seconds, cpu_s = timed(call, arrays.rewrite, calls, barrier, pause_s=pause_s)
            times.seconds[name].append(seconds)
            times.cpu_s[name].append(cpu_s)
        rank.send(times)
    barrier()
