"""`python -m benchmarks codec`: bytes and seconds of compact packets, on one thread.

Index sets are those of a uniform choice, of which the entropy is known, and, with --residuals, the
largest elements of real ones (`python -m benchmarks residuals`). Each is encoded with values of
every code; the decoded result is checked before any timing. A rate counts whole packets: indices,
values, headers, and every check. The comparison is a copy of the pairs (8 bytes each).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pycomm
from benchmarks.support import command
from pycomm import _core, kernels
from pycomm._core_api.arrays import as_array_ref
from pycomm.bench.kernels import residuals
from pycomm.kernels import compact
from pycomm.kernels.compact import VALUES

SPARSITIES = (0.75, 0.9375, 0.984375, 0.996, 0.999, 0.9999)
INDICES = ("list", "bitmap", "rice")
Array = Any  # of NumPy


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns the exit status."""
    counts: dict[str, Any] = {"count": (2**24, "elements"), "most": (2**20, "kept elements")}
    parser = command.parser("codec", __doc__, rounds=(21, ""), **counts)
    command.add_names(parser, "values", VALUES, VALUES)
    parser.add_argument("--residuals", type=Path, help="of `python -m benchmarks residuals`")
    options = parser.parse_args(argv)
    before = _core.kernel_threads()
    pycomm.set_num_threads(1)
    sets = _sets(options.count, options.most, options.residuals)
    rows = [
        measured(named, indices, code, options.rounds)
        for *named, indices in command.progress(sets, "index sets")
        for code in options.values
    ]
    pycomm.set_num_threads(before)
    settings = {"threads": 1, "rounds": options.rounds, "isa": _core.kernel_isa()}
    command.report(options.json, settings=settings, rows=rows)
    return 0


def _sets(count: int, most: int, stored: Path | None) -> Iterator[tuple[str, float, int, Array]]:
    """(name, sparsity, count, indices): of fewer elements where they would be more than `most`."""
    rng = np.random.default_rng(0)
    for sparsity in SPARSITIES:
        share = 1 - sparsity
        some = min(count, round(most / share))
        chosen = rng.choice(some, max(1, round(some * share)), replace=False)
        yield "uniform", sparsity, some, np.sort(chosen).astype(np.int32)
    if stored:
        v = residuals.load(stored).v.reshape(-1)
        for sparsity in SPARSITIES:
            some = v[: min(v.size, round(most / (1 - sparsity)))]
            k = max(1, round(some.size * (1 - sparsity)))
            yield "residuals", sparsity, some.size, kernels.topk(some, k)[0]


def measured(named: Sequence[Any], indices: Array, code: str, rounds: int) -> dict[str, Any]:
    """One set of indices with values of one code: all calls in turn, round by round; the first
    round is not timed. `named`: data, sparsity, count. Rates are in millions of elements a second.
    """
    name, sparsity, count = named
    k = indices.size
    magnitudes = 1 + np.random.default_rng(1).exponential(size=k)
    values = (magnitudes * np.random.default_rng(2).choice([-1, 1], k)).astype(np.float32)
    room = np.empty(kernels.packet_bytes(k, code, codec="auto", count=count), np.uint8)
    packet = kernels.encode(indices, values, count, code, codec="auto", out=room).copy()
    back, _ = kernels.unpack(packet)
    if back.tobytes() != indices.tobytes():
        raise AssertionError(f"{name} at {sparsity}, {code}: other indices came back")
    pairs = indices.copy(), values.copy()
    targets = np.empty_like(indices), np.empty_like(values)
    found = as_array_ref(packet, "packet")
    row = found.pointer, found.nbytes, k, 0, count

    def copy() -> None:
        for target, source in zip(targets, pairs, strict=True):
            np.copyto(target, source)

    def decode() -> None:
        compact.decode([row], found)

    def encode() -> None:
        kernels.encode(indices, values, count, code, codec="auto", out=room)

    rates, bests = _rates(k, rounds, {"encode": encode, "decode": decode, "copy": copy})
    head = 5 + _varint_bytes(k) + _varint_bytes(count)
    longest_head = kernels.packet_bytes(0, code, codec="list")
    coded = kernels.packet_bytes(k, code, codec="list") - longest_head - 4 * k
    index_bytes = packet.nbytes - head - coded
    return {
        "data": name,
        "sparsity": sparsity,
        "count": count,
        "k": k,
        "values": code,
        "indices": INDICES[int(packet[3]) % 16],  # the code that was chosen
        "bytes_each": packet.nbytes / k,  # of a kept element, headers included
        "index_bits": 8 * index_bytes / k,
        "entropy_bits": entropy_bits(count, k),  # of a uniform choice
        **rates,  # of the median call
        **bests,  # of the fastest call
    }


def _varint_bytes(number: int) -> int:
    return max(1, -(-number.bit_length() // 7))


def _rates(
    k: int, rounds: int, calls: dict[str, Callable[[], object]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Millions of elements in a second, of the median call and of the fastest; short calls are
    repeated."""
    repeats = max(1, min(100, 200_000 // k))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            if turn:
                seconds[name].append((time.perf_counter() - begin) / repeats)
    medians = {f"{name}_rate": k / statistics.median(own) / 1e6 for name, own in seconds.items()}
    return medians, {f"{name}_best": k / min(own) / 1e6 for name, own in seconds.items()}


def entropy_bits(count: int, k: int) -> float:
    """Of an index, where all sets of k indices are alike: log2 C(count, k) / k."""
    ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return ways / math.log(2) / k
