"""One kernel and the equivalent calls of other libraries, for `bench kernels`.

A comparison has its own float32 arrays on one device, the minimum of bytes to move, the reference
result, pycomm's call and those of the others. pycomm must match the reference bit by bit; the
others may differ by rounding. sparse.py makes comparisons; benchmark.py times them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

OURS = "pycomm"
LINE = 64
"""Bytes of a cache line, and the fewest that a GPU's memory moves."""
Array = Any  # of NumPy
Packet = tuple[Tensor, Tensor]
Call = Callable[[int], Any]


class Traffic(NamedTuple):
    """Bytes that every implementation must read from memory and write to it."""

    read: float
    written: float


@dataclass(frozen=True)
class Comparison:
    """Calls are given the number of the step and return their result: arrays in a list."""

    kernel: str
    traffic: Traffic
    wanted: Callable[[], Sequence[Array]]  # of step 0 after restart()
    calls: dict[str, Call]
    restart: Callable[[], object] = lambda: None
    rounding: float = 0  # of others' results, beside the largest magnitude of the reference's
    compared: Callable[[Sequence[Array]], Sequence[Array]] = lambda results: results
    """The part of the results that must match."""
    skipped: Collection[str] = ()  # peers whose results are not compared
    waits: Collection[str] = ()  # peers that wait for the device, so no graph can hold them
    more: dict[str, Traffic] = field(default_factory=dict)  # peers that need more traffic


def touched(packets: Sequence[Packet]) -> int:
    """Bytes of the cache lines of a float32 array in which the packets have an index."""
    places = np.concatenate([host(indices) for indices, _ in packets])
    return LINE * int(np.unique(places // (LINE // 4)).size)


def host(x: Any) -> Array:
    """The elements in host memory; of bfloat16 as float32."""
    if isinstance(x, Tensor):
        return (x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy()
    return np.asarray(x)
