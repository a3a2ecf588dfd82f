"""How much is sent at which step, and how many bytes that is: pure functions of counts.

Called by dgc.py, exchange_policy.py and cost_model.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pycomm.errors import InvalidArgument

__all__ = [
    "K_RULES",
    "VALUE_DTYPES",
    "Load",
    "between",
    "check_ramp",
    "code_at",
    "index_bits",
    "level_at",
    "packet_bytes",
    "received_bytes",
    "to_send",
]

K_RULES = ("round", "paddle", "ceil")
INDEX_BYTES = 4
# With the scales and levels that elements share, csrc/kernels/lean.h.
VALUE_BITS = {
    "float32": 32,
    "bfloat16": 16,
    "int8": 8 + 32 / 256,
    "3bit": 3 + 32 / 4096,
    "2bit": 2 + 32 / 4096,
    "1bit": 1 + 16 / 4096,
}
VALUE_DTYPES = tuple(VALUE_BITS)
HEAD_BYTES = 16  # of a compact packet, with its length
BETWEEN = ("gather", "sharded")  # hosts
ONE_BIT_DENSITY_THRESHOLD = (
    0.17  # density where packets of 2-bit values take a bit for each element of all
)


@dataclass(frozen=True)
class Load:
    """What each rank takes out at one level.

    Attributes:
        ks, counts: how many of how many elements, for each that has a k of its own.
        itemsize: bytes of a value as it is.
        value_dtype: of compact packets; None: packets are raw.
        owner_k_factor: what all owners together send on, in multiples of k.
    """

    ks: Sequence[int]
    counts: Sequence[int]
    itemsize: int
    value_dtype: str | None
    owner_k_factor: int = 1

    @property
    def k(self) -> int:
        """Of all together."""
        return sum(self.ks)

    @property
    def count(self) -> int:
        """Of all together."""
        return sum(self.counts)


def check_ramp(begin: int, length: int, sparsity: Sequence[float]) -> tuple[float, ...]:
    """The levels as a tuple; an empty list is [0.999]. InvalidArgument where they make no sense."""
    levels = tuple(float(s) for s in sparsity) or (0.999,)
    if begin < 0 or length < 1:
        raise InvalidArgument(
            f"rampup_begin_step={begin} must be at least 0, rampup_step={length} at least 1"
        )
    if not all(0 <= s < 1 for s in levels) or list(levels) != sorted(levels):
        raise InvalidArgument(f"sparsity={list(levels)}: from 0 to below 1, never falling")
    return levels


def level_at(step: int, begin: int, length: int, levels: int) -> int | None:
    """Which level of sparsity holds at a step counted from 0; None: dense."""
    if step < begin:
        return None
    return min((step - begin) * levels // length, levels - 1)


def to_send(count: int, sparsity: float, rule: str = "round") -> int:
    """k, of `count` elements; at least 1.

    "round" rounds half to even; "paddle" cuts off in float32, as its operator does (0.999 of 1e6
    leaves 999); "ceil" rounds up, as the paper's authors do.
    """
    if rule == "paddle":
        ratio = np.float32(1) - np.float32(sparsity)
        k = int(np.float32(count) * ratio)
    elif rule == "ceil":
        k = math.ceil(count * (1 - sparsity) - 1e-6)
    else:
        k = round(count * (1 - sparsity))
    return min(max(1, k), count)


def packet_bytes(
    ks: Sequence[int], counts: Sequence[int], itemsize: int, value_dtype: str | None
) -> int:
    """Of packets of ks of counts elements each: raw ones where `value_dtype` is None, else what
    compact ones take where indices are spread evenly; where they lie together it is less."""
    if value_dtype is None:
        return sum(ks) * (itemsize + INDEX_BYTES)
    bits = sum(
        k * VALUE_BITS[value_dtype] + min(count, k * index_bits(k / count))
        for k, count in zip(ks, counts, strict=True)
    )
    return math.ceil(bits / 8) + HEAD_BYTES * len(ks)


def index_bits(density: float) -> float:
    """What a Rice code takes for an index on average, where each element is sent with probability
    `density`: a gap of g elements has the probability (1 - density)^g density, and its parameter b
    is the one that takes the fewest bits."""
    reaches = [(1 - density) ** (1 << b) for b in range(31)]  # a gap of 2^b and more
    return min(b + 1 + r / (1 - r) for b, r in enumerate(reaches))


def code_at(value_dtype: str, density: float) -> str:
    """How "auto" and "auto_time" code values: where so many are sent, and may be rounded, as signs,
    which with the zeros between them make a ternary gradient."""
    return (
        "1bit" if density > ONE_BIT_DENSITY_THRESHOLD and value_dtype != "float32" else value_dtype
    )


def received_bytes(load: Load, size: int, hosts: int = 1) -> dict[str, float]:
    """What a line brings in a step, by exchange. Of `size` ranks each has one; where they lie on
    several hosts, of as many ranks each, each host has. With H lines and L ranks behind each:

        gather        size - L packets
        dense_masked  2 (H - 1) / H of all gradients, as a ring does
        sharded       L times (H - 1) / H of a packet, which owners receive, and once of one of
                      owner_k_factor k elements, and heads; compact packets only
        hierarchical  the fewer of gather and sharded between hosts; of compact packets where L > 1

    Of raw packets of float32, a line for each rank, gather wins where size * (1 - sparsity) < 1.
    """
    lines = hosts if hosts > 1 else size
    here, code = size / lines, load.value_dtype
    others = size - here  # ranks behind other lines
    packets = packet_bytes(load.ks, load.counts, load.itemsize, code)
    dense = load.count * load.itemsize
    found = {"gather": others * packets, "dense_masked": 2 * (lines - 1) / lines * dense}
    if code is not None:
        heads = HEAD_BYTES * len(load.ks)
        sent_on = [
            min(load.owner_k_factor * k, n) for k, n in zip(load.ks, load.counts, strict=True)
        ]
        onward = packet_bytes(sent_on, load.counts, load.itemsize, code)
        found["sharded"] = others * (
            here * ((packets - heads) / size + heads) + (onward - heads) / size + heads
        )
        if here > 1:
            found["hierarchical"] = min(received_bytes(load, lines)[way] for way in BETWEEN)
    return found


def between(load: Load, hosts: int) -> str:
    """By which exchange the hosts of "hierarchical" send each other packets: that of fewer
    bytes."""
    counted = received_bytes(load, hosts)
    return min(BETWEEN, key=lambda way: counted[way])
