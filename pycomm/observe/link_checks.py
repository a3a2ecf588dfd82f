"""The checks of links between ranks for `pycomm doctor`: latency, rate and clock of pairs."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycomm import collectives, config
from pycomm.group import Group

ALL_PAIRS = 8  # hosts, up to which every pair of hosts is measured
ROUNDS, MESSAGES, MESSAGE_BYTES = 50, 8, 4 << 20


@dataclass(frozen=True)
class Link:
    """A pair of ranks.

    Attributes:
        transport: local, shm or tcp.
        latency_us: half the median round trip of 8 bytes.
        rate_gb_s: bytes of large messages in one direction, in 1e9 bytes a second.
        clock_ms: the clock of `b` minus that of `a`.
    """

    a: int
    b: int
    transport: str
    latency_us: float
    rate_gb_s: float
    clock_ms: float


def pairs(hosts: list[str]) -> list[tuple[int, int]]:
    """The pairs of ranks to measure, given the host of each rank: the first two ranks of each host,
    and the first ranks of every two hosts; of more than ALL_PAIRS hosts, those of neighbours."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    found = [(ranks[0], ranks[1]) for ranks in by_host.values() if len(ranks) > 1]
    first = [ranks[0] for ranks in by_host.values()]
    if len(first) <= ALL_PAIRS:
        return found + list(itertools.combinations(first, 2))
    return found + list(zip(first, first[1:] + first[:1], strict=True))


def measure(group: Group, chosen: list[tuple[int, int]]) -> Iterator[Link | None]:
    """Measures the pairs, one after the other. Collective; the Link is for rank 0, after each."""
    for a, b in chosen:
        found = np.zeros(4)  # the transport's index, and the figures
        if group.rank == a:
            found[:] = (
                config.TRANSPORTS.index(group.peer_info()[b].transport),
                *_ping(group, b, True),
            )
        elif group.rank == b:
            _ping(group, a, False)
        collectives.broadcast(found, a, group=group)
        by, *figures = found.tolist()
        yield Link(a, b, config.TRANSPORTS[int(by)], *figures) if group.rank == 0 else None


def _ping(group: Group, peer: int, leads: bool) -> tuple[float, float, float]:
    """Latency, rate and clock difference; right where `leads`."""
    send: Any = collectives.send
    recv: Any = collectives.recv
    there, back = (send, recv) if leads else (recv, send)
    clock, large = np.zeros(1), np.zeros(MESSAGE_BYTES, np.uint8)
    trips, rates = [], []
    for _ in range(ROUNDS):
        begin = time.time()
        there(clock, peer, group=group)
        if not leads:
            clock[0] = time.time()
        back(clock, peer, group=group)
        end = time.time()
        trips.append((end - begin, float(clock[0]) - (begin + end) / 2))
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(MESSAGES):
            there(large, peer, group=group)
        back(clock, peer, group=group)
        rates.append(MESSAGES * MESSAGE_BYTES / (time.perf_counter() - start) / 1e9)
    latency_us = statistics.median(seconds for seconds, _ in trips) / 2 * 1e6
    return latency_us, max(rates), min(trips)[1] * 1e3  # the shortest trip is the most exact
