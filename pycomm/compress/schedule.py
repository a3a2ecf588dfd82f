"""The sparsity warm-up schedule, and the bytes of each exchange: pure functions of counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pycomm._arguments import integer, numbers_in
from pycomm.errors import InvalidArgument

K_RULES = ("round", "paddle", "ceil")
INDEX_BYTES = 4
# With the levels of a block, see csrc/codec/compact.h.
VALUE_BITS = {
    "float32": 32,
    "bfloat16": 16,
    "3bit": 3 + 32 / 4096,
    "2bit": 2 + 32 / 4096,
    "1bit": 1 + 16 / 4096,
}
VALUE_DTYPES = tuple(VALUE_BITS)
HEAD_BYTES = 16  # header of a compact packet, with its length
BETWEEN = ("gather", "sharded")  # exchanges between hosts
# At this density a packet of 2-bit values has one bit for each element of the array.
ONE_BIT_DENSITY_THRESHOLD = 0.17


@dataclass(frozen=True)
class Load:
    """The elements that each rank selects at one level.

    Attributes:
        ks, counts: selected elements and all elements, for each unit with its own k.
        itemsize: bytes of an unencoded value.
        value_dtype: of compact packets; None: raw packets.
        owner_k_factor: elements that all owners together send, in multiples of k.
    """

    ks: Sequence[int]
    counts: Sequence[int]
    itemsize: int
    value_dtype: str | None
    owner_k_factor: int = 1

    @property
    def k(self) -> int:
        """Selected elements of all units."""
        return sum(self.ks)

    @property
    def count(self) -> int:
        """Elements of all units."""
        return sum(self.counts)


@dataclass(frozen=True)
class SparsityWarmup:
    """The sparsity warm-up: the levels share `length` steps evenly, and the last one remains.

    Attributes:
        begin: the first compressed step, counted from 0; earlier steps are dense.
        length: steps of the warm-up.
        sparsity: the fraction of elements that is not sent, by level.
    """

    begin: int
    length: int
    sparsity: tuple[float, ...]

    @classmethod
    def of(cls, begin: int, length: int, sparsity: float | Sequence[float]) -> SparsityWarmup:
        """A valid warm-up; a number is one level.

        Raises:
            InvalidArgument: begin or length is no whole number, a negative begin, a length below 1,
                or no numbers, or levels outside 0 <= s < 1 or decreasing.
        """
        integer("rampup_begin_step", begin, 0)
        integer("rampup_step", length, 1)
        levels = tuple(numbers_in("sparsity", sparsity))
        if not all(0 <= s < 1 for s in levels) or list(levels) != sorted(levels):
            raise InvalidArgument(
                f"invalid sparsity: got {list(levels)}, expected 0 <= s < 1, not decreasing"
            )
        return cls(begin, length, levels)

    def level_at(self, step: int) -> int | None:
        """The index of the level of a step, counted from 0; None: dense."""
        if step < self.begin:
            return None
        last = len(self.sparsity) - 1
        return min((step - self.begin) * len(self.sparsity) // self.length, last)


def to_send(count: int, sparsity: float, rule: str = "round") -> int:
    """The number k of sent elements of `count`; at least 1.

    "round" rounds half to even. "paddle" truncates in float32 as Paddle's operator does (0.999 of
    1e6 leaves 999). "ceil" rounds up as the authors of the DGC paper do.
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
    """Bytes of packets with ks of counts elements; raw packets if `value_dtype` is None. For
    compact packets an estimate for evenly distributed indices; clustered ones need fewer bytes."""
    if value_dtype is None:
        return sum(ks) * (itemsize + INDEX_BYTES)
    bits = sum(
        k * VALUE_BITS[value_dtype] + min(count, k * index_bits(k / count))
        for k, count in zip(ks, counts, strict=True)
    )
    return math.ceil(bits / 8) + HEAD_BYTES * len(ks)


def index_bits(density: float) -> float:
    """Mean bits of an index in a Rice code if each element is sent with probability `density`.

    A gap of g elements has probability (1 - density)^g density; the parameter b minimizes the bits.
    """
    reaches = [(1 - density) ** (1 << b) for b in range(31)]  # probability of a gap of at least 2^b
    return min(b + 1 + r / (1 - r) for b, r in enumerate(reaches))


def code_at(value_dtype: str, density: float) -> str:
    """The dtype of encoded values under "auto" and "auto_time": signs above the density threshold,
    if rounding is allowed. With the zeros between them they form a ternary gradient."""
    return (
        "1bit" if density > ONE_BIT_DENSITY_THRESHOLD and value_dtype != "float32" else value_dtype
    )


def received_bytes(load: Load, size: int, hosts: int = 1) -> dict[str, float]:
    """Bytes that a link receives in a step, by exchange. Each rank has one link; with several hosts
    of equally many ranks, each host has one. With H links and L ranks behind each:

        gather        size - L packets
        dense_masked  2 (H - 1) / H of all gradients, as a ring does
        sharded       L times (H - 1) / H of a packet for the owners, once of a packet with
                      owner_k_factor k elements, and headers; compact packets only
        hierarchical  the smaller of gather and sharded between hosts; compact packets, L > 1

    With raw float32 packets and a link for each rank, gather is best if size * (1 - sparsity) < 1.
    """
    links = hosts if hosts > 1 else size
    per_link, code = size / links, load.value_dtype
    others = size - per_link  # ranks behind other links
    packets = packet_bytes(load.ks, load.counts, load.itemsize, code)
    dense = load.count * load.itemsize
    found = {"gather": others * packets, "dense_masked": 2 * (links - 1) / links * dense}
    if code is not None:
        heads = HEAD_BYTES * len(load.ks)
        sent_on = [
            min(load.owner_k_factor * k, n) for k, n in zip(load.ks, load.counts, strict=True)
        ]
        onward = packet_bytes(sent_on, load.counts, load.itemsize, code)
        found["sharded"] = others * (
            per_link * ((packets - heads) / size + heads) + (onward - heads) / size + heads
        )
        if per_link > 1:
            found["hierarchical"] = min(received_bytes(load, links)[name] for name in BETWEEN)
    return found


def inter_host_exchange(load: Load, hosts: int) -> str:
    """The exchange between the hosts of "hierarchical": the one with fewer bytes."""
    counted = received_bytes(load, hosts)
    return min(BETWEEN, key=lambda name: counted[name])
