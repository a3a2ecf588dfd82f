"""Runs a benchmark at a small size."""

import shlex
from pathlib import Path
from typing import Any

from benchmarks.reliability import soak
from pycomm import bench
from pycomm.bench.support import summaries


def stored(folder: Path, words: str, *, plot: bool = False, status: int = 0) -> dict[str, Any]:
    """What `pycomm bench WORDS` stores; it must end with `status` and draw if `plot`."""
    results, drawn = folder / "out.json", folder / "out.svg"
    more = ["--plot", str(drawn)] if plot else []
    assert bench.main([*shlex.split(words), "--json", str(results), *more]) == status
    assert not plot or "prefers-color-scheme: dark" in drawn.read_text()
    return summaries.read(results)


def first_epoch(seed: int, action: str, transport: str = "") -> int:
    """The first epoch of the soak with this fault; with a transport: of threads."""

    def fits(number: int) -> bool:
        job = soak.epoch_of(seed, number)
        among = not transport or (job.transport, job.processes) == (transport, False)
        return job.action == action and among

    return next(filter(fits, range(10_000)))
