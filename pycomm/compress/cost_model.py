"""How long each exchange takes: counted bytes, and the measured speed of the link and of coding.

    link     all_reduces of a small and of a large array: seconds of a call, and of a byte
    coding   the kernels on drawn elements, as dense as those of the level: seconds of an element

A model, not a trial: nothing is trained meanwhile. Called by exchange_policy.py for
exchange="auto_time", and by the planner with links that are not here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pycomm import collectives, kernels
from pycomm.communicators import CommunicatorPool
from pycomm.compress.hierarchical import hosts_of
from pycomm.compress.schedule import Load, between, received_bytes
from pycomm.group import Group

__all__ = [
    "FLAT",
    "Coding",
    "Levels",
    "Link",
    "measure_coding",
    "measure_link",
    "of_exchanges",
    "predicted",
]

# Bytes: a call's own time, and what a line takes (0.3 s at 100 Mbit).
SMALL, LARGE = 1 << 12, 1 << 22
SAMPLE = 1 << 20  # elements of a gradient that coding is measured on
CALLS = 5


@dataclass(frozen=True)
class Link:
    """What a line takes: seconds of a call, and of a byte that it brings."""

    call_s: float
    byte_s: float


@dataclass(frozen=True)
class Levels:
    """How many hosts there are, each with a line, and what bytes take inside of one."""

    hosts: int
    inside: Link


FLAT = Levels(1, Link(0.0, 0.0))  # a line for each rank


@dataclass(frozen=True)
class Coding:
    """Seconds of one element; of a gradient's: `select`, `scan`; of a kept one: the others.

    Attributes:
        select: u, v take it in and the largest are taken out.
        scan: reading it to find the largest, or writing zeros.
        encode, decode: in and out of a packet; 0 where packets are raw.
        add: to where it belongs.
    """

    select: float
    scan: float
    encode: float
    decode: float
    add: float


def of_exchanges(load: Load, pool: CommunicatorPool, may_be_dense: bool) -> dict[str, float]:
    """Collective: seconds of a step by exchange, each rank's own; "dense" where it is a choice."""
    group, of_rank, levels = pool.group, hosts_of(pool.group), FLAT
    hosts = max(of_rank) + 1
    if 1 < hosts < group.size:
        here = group.split(of_rank[group.rank])
        assert here is not None  # every rank is on a host
        levels = Levels(hosts, measure_link(here))
        here.close()
    found = predicted(load, pool.size, measure_link(group, hosts), measure_coding(load), levels)
    found["dense"] += load.count * _momentum_s()  # which dgc_step has in it
    if not may_be_dense:
        del found["dense"]
    return found


def predicted(
    load: Load, size: int, link: Link, coding: Coding, levels: Levels = FLAT
) -> dict[str, float]:
    """Seconds that a step takes beyond its gradients, by exchange; "dense" compresses nothing.

    What could hide behind the backward pass is not taken off: what travels takes the time of the
    same processors. Over 10 Gbit/s (`bench links --training`, Intel Xeon, 2 processors) sums beside
    the backward pass took longer than behind it.

    Args:
        load: what each rank takes out.
        size: how many ranks.
        link, coding: as measured.
        levels: where several ranks share a line.
    """
    received = received_bytes(load, size, levels.hosts)
    travel = {name: bytes_ * link.byte_s + link.call_s for name, bytes_ in received.items()}
    k, scan = load.k, coding.scan * load.count
    kept = k * (coding.encode + coding.decode + coding.add)
    # Into u, v and out of them; what has arrived is written over zeros.
    every = coding.select * load.count + scan
    compact = load.value_dtype is not None
    found = {
        "dense": travel["dense_masked"],
        "gather": every
        + travel["gather"]
        + compact * link.call_s  # lengths go ahead
        + kept
        + (size - 1) * k * (coding.decode + coding.add),
        "dense_masked": every + travel["dense_masked"],
    }
    if compact:
        # Coded on both ways; an owner writes its share and looks for the largest.
        coded = (1 + load.owner_k_factor) * kept
        found["sharded"] = every + travel["sharded"] + 3 * link.call_s + coded + 2 * scan / size
    if "hierarchical" in received:
        # Sums inside a host, then what one rank of each does, and handing on what that has got.
        hosts, inside = levels.hosts, levels.inside
        summed = 2 * (1 - hosts / size) * load.count * load.itemsize
        found["hierarchical"] = (
            predicted(load, hosts, link, coding)[between(load, hosts)]
            + (summed + received["hierarchical"]) * inside.byte_s
            + 3 * inside.call_s
        )
    return found


def measure_link(group: Group, hosts: int = 1) -> Link:
    """Collective: medians of a few calls."""
    lines = hosts if hosts > 1 else group.size

    def all_reduce_s(nbytes: int) -> float:
        x = torch.zeros(nbytes // 4)
        return _typical(lambda: collectives.all_reduce(x, group=group))

    small, large = all_reduce_s(SMALL), all_reduce_s(LARGE)
    received = 2 * (lines - 1) / lines * (LARGE - SMALL)
    return Link(small, max(0.0, large - small) / received if received else 0.0)


def measure_coding(load: Load) -> Coding:
    """On drawn elements, as many of a sample as the load has of its own."""
    count = min(load.count, SAMPLE)
    k = max(1, min(count, round(count * load.k / load.count)))
    drawn = torch.Generator().manual_seed(0)
    u, v, g = (torch.randn(count, generator=drawn) for _ in range(3))
    indices, values = kernels.topk(v, k)
    out = torch.empty(count)

    def select() -> None:
        kernels.dgc_step(g, u, v, k, momentum=0.9)

    step_s = _typical(select)
    scan_s = _typical(lambda: kernels.topk(g, k))
    fill_s = _typical(out.zero_)
    sum_s = _typical(lambda: kernels.decode_sum(out, [(indices, values)]))
    encode_s = decode_s = 0.0
    if load.value_dtype is not None:
        code = load.value_dtype
        packet = kernels.encode(indices, values, count, code, codec="auto")
        encode_s = _typical(lambda: kernels.encode(indices, values, count, code, codec="auto"))
        decode_s = _typical(lambda: kernels.unpack(packet))
    added_s = max(0.0, sum_s - fill_s)
    return Coding(step_s / count, scan_s / count, encode_s / k, decode_s / k, added_s / k)


def _momentum_s() -> float:
    """Seconds of an element: what dense.py does behind an average."""
    u, x = torch.zeros(SAMPLE), torch.zeros(SAMPLE)
    return _typical(lambda: x.copy_(u.mul_(0.9).add_(x))) / SAMPLE


def _typical(call: Callable[[], object]) -> float:
    """The median of a few calls after one that warms up."""
    call()
    found = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)
