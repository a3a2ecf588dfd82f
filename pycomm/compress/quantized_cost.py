"""Estimates the time of each exchange of quantized arrays, as cost_model.py does for DGC.

link     as in cost_model.py
coding   the kernels on random elements: seconds per element in each phase
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pycomm.compress.cost_model import FLAT, HOST, SAMPLE, Link, Topology, measure_links, median_s
from pycomm.group import Group
from pycomm.kernels import quantized


@dataclass(frozen=True)
class QuantizedLoad:
    """The arrays of one step.

    Attributes:
        count: elements.
        nbytes: bytes without compression.
        bits, down_bits: of Quantize.
        device: of the arrays.
    """

    count: int
    nbytes: int
    bits: int
    down_bits: int
    device: torch.device = HOST


@dataclass(frozen=True)
class PhaseCoding:
    """Seconds per element of a phase: to encode it with error feedback, and to decode and add."""

    encode: float
    decode: float


def measure_exchanges(load: QuantizedLoad, group: Group) -> dict[str, float]:
    """Collective. This rank's estimated seconds of a step, by exchange."""
    link, topology = measure_links(group, load.device)
    up, down = (
        measure_phase(bits, load.count, load.device) for bits in (load.bits, load.down_bits)
    )
    return predicted(load, group.size, link, up, down, topology)


def predicted(
    load: QuantizedLoad,
    size: int,
    link: Link,
    up: PhaseCoding,
    down: PhaseCoding,
    topology: Topology = FLAT,
) -> dict[str, float]:
    """Seconds of a step beyond its backward pass, by exchange.

    As in cost_model.predicted, overlap with the backward pass is not subtracted.

    Args:
        load: the arrays.
        size: number of ranks.
        link: measured speed. Each rank has a link, or each host if there are several hosts.
        up, down: measured speeds of the phases to the owners and from the owners.
        topology: for several ranks behind one link.
    """
    hosts, inside = topology.hosts, topology.inside
    links = hosts if hosts > 1 else size
    behind = size / links  # ranks of a link
    phases = [quantized.quantized_bytes(load.count, b) for b in (load.bits, load.down_bits)]
    received = behind * (size - behind) / size * sum(phases)
    coded = (up.encode + up.decode + down.encode / size + down.decode) * load.count
    found = {
        "dense": 2 * (links - 1) / links * load.nbytes * link.byte_s + link.call_s,
        "sharded": received * link.byte_s + 2 * link.call_s + coded,
    }
    if behind > 1:
        # The mean inside a host in float32, then packets between hosts, then broadcasts of them.
        summed = 2 * (1 - 1 / behind) * 4 * load.count
        found["hierarchical"] = (
            predicted(load, hosts, link, up, down)["sharded"]
            + (summed + sum(phases)) * inside.byte_s
            + 3 * inside.call_s
        )
    return found


def measure_phase(bits: int, count: int, device: torch.device = HOST) -> PhaseCoding:
    """Seconds per element on a random sample of at most `count` elements."""
    count = min(count, SAMPLE)
    x = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(device)
    residual, total = torch.zeros_like(x), torch.zeros_like(x)
    packet = quantized.quantize(x, bits, residual)
    encode_s = median_s(lambda: quantized.quantize(x, bits, residual, packet), device)
    decode_s = median_s(lambda: quantized.dequantize(packet, bits, total, accumulate=True), device)
    return PhaseCoding(encode_s / count, decode_s / count)
