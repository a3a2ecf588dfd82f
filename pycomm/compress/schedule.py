"""How much is sent at which step, and by which exchange: pure functions of counts.

Called by dgc.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pycomm.errors import InvalidArgument

__all__ = ["K_RULES", "check_ramp", "gather_is_smaller", "level_at", "to_send"]

K_RULES = ("round", "paddle", "ceil")
INDEX_BYTES = 4


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


def gather_is_smaller(ks: Sequence[int], counts: Sequence[int], itemsize: int, size: int) -> bool:
    """Whether a rank receives fewer bytes in an all-gather of packets than in a ring of all.

    (size - 1) packets of (value, int32 index) against 2 (size - 1) / size of the whole: sparse
    wins where size * (1 - sparsity) < 1, for float32.
    """
    packets = (size - 1) * sum(ks) * (itemsize + INDEX_BYTES)
    ring = 2 * (size - 1) * sum(counts) * itemsize
    return packets * size < ring or size == 1
