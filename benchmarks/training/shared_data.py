"""`python -m benchmarks shared_data`: memory and seconds of DataLoader(shared=True).

Ranks of one host, each a process without workers, read shuffled epochs of images that zlib
decompresses: "decode" in each epoch, "cache" in a dict of each rank, "shared" in one copy of the
host. "mib" is the memory of the host, the sum over the ranks of the increase in PSS (smaps_rollup),
which divides shared pages among the processes that map them. "seconds" are the slowest rank's: of
the constructor, then of each epoch.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import pycomm
from benchmarks.support import command
from pycomm.testing import run_ranks

WAYS = ("decode", "cache", "shared")
SHAPE = (3, 224, 224)
BYTES = int(np.prod(SHAPE))


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns the exit status."""
    counts: dict[str, Any] = {"ranks": (2, ""), "count": (2000, "images"), "epochs": (4, "")}
    options = command.parser("shared_data", __doc__, **counts).parse_args(argv)
    rows = []
    for way in command.progress(WAYS, "ways to read"):
        ranks = run_ranks(
            options.ranks, measure, way, options.count, options.epochs,
            transport="", processes=True, timeout_s=600.0,
        )  # fmt: skip
        seconds = [max(times) for times in zip(*(times for times, _ in ranks), strict=True)]
        mib = sum(grown for _, grown in ranks) / 2**20
        rows.append({"way": way, "seconds": seconds, "mib": mib})
    more = {"shape": list(SHAPE), "decoded_mib": options.count * BYTES / 2**20}
    settings = command.chosen(options, "ranks", "count") | more
    command.report(options.json, settings=settings, rows=rows)
    return 0


class Images(Dataset[Any]):
    """Images that are stored compressed; a few, repeated."""

    def __init__(self, count: int, cache: bool) -> None:
        random = np.random.default_rng(0)
        self._stored = [
            zlib.compress(random.integers(0, 16, SHAPE, np.uint8).tobytes()) for _ in range(8)
        ]
        self._count = count
        self._cache: dict[int, torch.Tensor] | None = {} if cache else None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._cache is not None and index in self._cache:
            return self._cache[index]
        raw = zlib.decompress(self._stored[index % len(self._stored)], bufsize=BYTES)
        image = torch.tensor(np.frombuffer(raw, np.uint8)).reshape(SHAPE)
        if self._cache is not None:
            self._cache[index] = image
        return image


def measure(group: pycomm.Group, way: str, count: int, epochs: int) -> tuple[list[float], int]:
    """In a rank: seconds of the constructor and of each epoch, and the increase of the PSS."""
    torch.set_num_threads(1)  # ranks share the processors
    images = Images(count, way == "cache")
    before = pss()
    times = [time.perf_counter()]
    loader = pycomm.data.DataLoader(images, batch_size=10, shuffle=True, shared=way == "shared")
    times.append(time.perf_counter())
    for _ in range(epochs):
        for _batch in loader:
            pass
        pycomm.barrier()
        times.append(time.perf_counter())
    grown = pss() - before
    pycomm.barrier()  # the other ranks still map their memory
    return [end - start for start, end in itertools.pairwise(times)], grown


def pss() -> int:
    """Bytes of this process in memory; those that n processes map count as 1/n."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("smaps_rollup has no Pss")
