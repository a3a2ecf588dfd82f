"""Estimates the time of each exchange from counted bytes and measured speeds.

link     all_reduce of a small and of a large array: seconds per call and per byte
coding   the kernels on random elements at the density of the level: seconds per element

Arrays are on the device of the gradients, which calls and packets do not leave.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pycomm import collectives, kernels
from pycomm._training.communicators import CommunicatorPool
from pycomm.compress.hierarchical import hosts_of
from pycomm.compress.schedule import Load, inter_host_exchange, received_bytes
from pycomm.group import Group

# Bytes: the small array shows the time of a call, the large one that of the link (0.3 s at
# 100 Mbit/s).
SMALL, LARGE = 1 << 12, 1 << 22
SAMPLE = 1 << 20  # elements of the gradient on which coding is measured
CALLS = 5
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Link:
    """Speed of a link: seconds per call, and per received byte."""

    call_s: float
    byte_s: float


@dataclass(frozen=True)
class Topology:
    """The number of hosts, each with one link, and the speed of transfers inside a host."""

    hosts: int
    inside: Link


FLAT = Topology(1, Link(0.0, 0.0))  # a link for each rank


@dataclass(frozen=True)
class Coding:
    """Seconds per element: of the gradient for `select` and `scan`, else per selected element.

    Attributes:
        select: accumulate into u and v, and select the largest.
        scan: read to find the largest, or write zeros.
        encode, decode: to and from a packet; 0 for raw packets.
        add: add to the result.
    """

    select: float
    scan: float
    encode: float
    decode: float
    add: float


def measure_exchanges(
    load: Load, pool: CommunicatorPool, may_be_dense: bool, device: torch.device = HOST
) -> dict[str, float]:
    """Collective: this rank's estimated seconds of a step by exchange; "dense" if it is allowed."""
    link, topology = measure_links(pool.group, device)
    found = predicted(load, pool.size, link, measure_coding(load, device), topology)
    found["dense"] += load.count * _momentum_s(device)  # dgc_step includes it for compressed steps
    if not may_be_dense:
        del found["dense"]
    return found


def predicted(
    load: Load, size: int, link: Link, coding: Coding, topology: Topology = FLAT
) -> dict[str, float]:
    """Seconds of a step beyond its backward pass, by exchange; "dense" compresses nothing.

    Overlap with the backward pass is not subtracted, because transfers use the same processors. At
    10 Gbit/s (`bench links --training`, Intel Xeon, 2 processors) overlapped sums took longer than
    sums after the backward pass.

    Args:
        load: the elements that each rank selects.
        size: number of ranks.
        link, coding: measured speeds.
        topology: for several ranks behind one link.
    """
    received = received_bytes(load, size, topology.hosts)
    transfer = {name: bytes_ * link.byte_s + link.call_s for name, bytes_ in received.items()}
    k, scan = load.k, coding.scan * load.count
    kept = k * (coding.encode + coding.decode + coding.add)
    # Accumulate and select; then write zeros before the received elements are added.
    every = coding.select * load.count + scan
    compact = load.value_dtype is not None
    found = {
        "dense": transfer["dense_masked"],
        "gather": every
        + transfer["gather"]
        + compact * link.call_s  # lengths are sent first
        + kept
        + (size - 1) * k * (coding.decode + coding.add),
        "dense_masked": every + transfer["dense_masked"],
    }
    if compact:
        # Encoded in both phases; an owner writes its shard and selects the largest.
        coded = (1 + load.owner_k_factor) * kept
        found["sharded"] = every + transfer["sharded"] + 3 * link.call_s + coded + 2 * scan / size
    if "hierarchical" in received:
        # Sums inside a host, then the exchange between hosts, then a broadcast inside a host.
        hosts, inside = topology.hosts, topology.inside
        summed = 2 * (1 - hosts / size) * load.count * load.itemsize
        found["hierarchical"] = (
            predicted(load, hosts, link, coding)[inter_host_exchange(load, hosts)]
            + (summed + received["hierarchical"]) * inside.byte_s
            + 3 * inside.call_s
        )
    return found


def measure_links(group: Group, device: torch.device = HOST) -> tuple[Link, Topology]:
    """Collective. The speed of the group's link, and that inside hosts if there are several ranks
    on several hosts."""
    topology, of_rank = FLAT, hosts_of(group)
    hosts = max(of_rank) + 1
    if 1 < hosts < group.size:
        here = group.split(of_rank[group.rank])
        assert here is not None  # every rank is on a host
        topology = Topology(hosts, measure_link(here, 1, device))
        here.close()
    return measure_link(group, hosts, device), topology


def measure_link(group: Group, hosts: int, device: torch.device) -> Link:
    """Collective. The speed of the group's link: medians of a few calls."""
    links = hosts if hosts > 1 else group.size

    def all_reduce_s(nbytes: int) -> float:
        x = torch.zeros(nbytes // 4, device=device)
        return median_s(lambda: collectives.all_reduce(x, group=group), device)

    small, large = all_reduce_s(SMALL), all_reduce_s(LARGE)
    received = 2 * (links - 1) / links * (LARGE - SMALL)
    return Link(small, max(0.0, large - small) / received if received else 0.0)


def measure_coding(load: Load, device: torch.device = HOST) -> Coding:
    """Seconds per element on a random sample with the density of the load."""
    count = min(load.count, SAMPLE)
    k = max(1, min(count, round(count * load.k / load.count)))
    drawn = torch.Generator().manual_seed(0)
    u, v, g = (torch.randn(count, generator=drawn).to(device) for _ in range(3))
    indices, values = kernels.topk(v, k)
    out = torch.empty(count, device=device)

    def select() -> None:
        kernels.dgc_step(g, u, v, k, momentum=0.9)

    step_s = median_s(select, device)
    scan_s = median_s(lambda: kernels.topk(g, k), device)
    fill_s = median_s(out.zero_, device)
    sum_s = median_s(lambda: kernels.decode_sum(out, [(indices, values)]), device)
    encode_s = decode_s = 0.0
    if load.value_dtype is not None:
        code = load.value_dtype
        batch = kernels.PacketBatch(indices, values, [k])
        (packet,) = kernels.encode_batch(batch, [count], code)
        encode_s = median_s(lambda: kernels.encode_batch(batch, [count], code), device)
        sizes = [len(packet)]
        decode_s = median_s(lambda: kernels.decode_batch(packet, sizes, [k], [count]), device)
    added_s = max(0.0, sum_s - fill_s)
    return Coding(step_s / count, scan_s / count, encode_s / k, decode_s / k, added_s / k)


def _momentum_s(device: torch.device) -> float:
    """Seconds per element of the momentum update after an average."""
    u, x = torch.zeros(2, SAMPLE, device=device)
    return median_s(lambda: x.copy_(u.mul_(0.9).add_(x)), device) / SAMPLE


def median_s(call: Callable[[], object], device: torch.device) -> float:
    """The median time of a few calls, until the device has completed them, after a warm-up."""
    last = torch.zeros(1, device=device)
    found = []
    for _ in range(CALLS + 1):
        start = time.perf_counter()
        call()
        last.cpu()  # waits
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])
