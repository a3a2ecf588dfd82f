"""The limit: how fast memory can be copied on this machine now, all ranks at once.

A copy of B bytes reads B and writes B. Each rank copies its own arrays with one thread, in the same
rounds as the contestants, and the fastest of three ways counts: plain stores (torch), the memcpy of
the C library (NumPy), which uses non-temporal stores if arrays exceed its share of the cache, and a
change in place, which writes the lines that it has read and so fetches no others. The source was
written just before, as a contestant's array is, so the caches hold the same part of both.
"""

from __future__ import annotations

import numpy as np
import torch

from pycomm.bench.collectives.cases import Case
from pycomm.bench.collectives.verbs import Call

SMALLEST_COPY = 2**16
"""Bytes. Smaller copies from Python measure Python: the bandwidth at this size is used for them."""

TOLERANCE = 1.03
"""A contestant this much faster than the limit shows that the limit is wrong."""


def copies(count_bytes: int, device: str | torch.device = "cpu") -> tuple[dict[str, Call], Call]:
    """Ways to read and write max(count_bytes, SMALLEST_COPY) bytes once, by name, and what rewrites
    the array that they read. On a device there is one, the driver's.
    """
    length = max(count_bytes, SMALLEST_COPY)
    original = torch.ones(length, dtype=torch.uint8).to(device)
    source, target = original.clone(), torch.zeros_like(original)
    if str(device) != "cpu":
        return {"copy device": lambda: target.copy_(source)}, lambda: source.copy_(original)
    source_array, target_array = source.numpy(), target.numpy()
    ways: dict[str, Call] = {
        "copy plain": lambda: target.copy_(source),
        "copy libc": lambda: np.copyto(target_array, source_array),
        "copy in place": lambda: np.invert(source_array, out=source_array),
    }
    return ways, lambda: source.copy_(original)


def limit_s(case: Case, copy_s: float) -> float:
    """Seconds that `case` takes at least, where the copy for case.bytes takes `copy_s`."""
    copied = max(case.bytes, SMALLEST_COPY)
    return copy_s * case.kind.traffic(case.size) / 2 * case.bytes / copied
