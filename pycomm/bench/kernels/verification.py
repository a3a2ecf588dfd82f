"""Compares the results of one kernel with those of pycomm.reference."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pycomm.bench.kernels.comparison import OURS, Array, Comparison, host
from pycomm.bench.kernels.device_timing import Cpu


def all_wrong(comparisons: Sequence[Comparison], place: Cpu) -> str:
    """Names the first peer whose result, computed as it is timed, differs from the reference; else
    "". NumPy needs seconds for a large result, so all references are computed at once."""
    with ThreadPoolExecutor() as pool:
        wanted = list(pool.map(_wanted, comparisons))
    found = (_wrong(*pair, place) for pair in zip(comparisons, wanted, strict=True))
    return next(filter(None, found), "")


def _compared_peers(comparison: Comparison) -> list[str]:
    return [peer for peer in comparison.calls if peer not in comparison.skipped]


def _wanted(comparison: Comparison) -> list[Array]:
    if not _compared_peers(comparison):
        return []
    return [np.asarray(x).reshape(-1) for x in comparison.wanted()]


def _wrong(comparison: Comparison, wanted: Sequence[Array], place: Cpu) -> str:
    for peer in _compared_peers(comparison):
        comparison.restart()
        given = place.result(comparison.calls[peer], waits=peer in comparison.waits)
        found = [host(x).reshape(-1) for x in given]
        if peer == OURS:
            pairs = zip(found, wanted, strict=True)
            same = all(a.tobytes() == b.tobytes() for a, b in pairs)
        else:
            pairs = zip(comparison.compared(found), comparison.compared(wanted), strict=True)
            same = all(_near(a, b, comparison.rounding) for a, b in pairs)
        if not same:
            return f"{comparison.kernel}: {peer} and the reference differ"
    comparison.restart()
    return ""


def _near(found: Array, wanted: Array, rounding: float) -> bool:
    atol = rounding * float(np.abs(wanted).max(initial=0))
    return found.shape == wanted.shape and bool(np.allclose(found, wanted, rtol=0, atol=atol))
