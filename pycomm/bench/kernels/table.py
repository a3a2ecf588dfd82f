"""The results of `bench kernels` as lines of a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pycomm.bench.support import machine, summaries
from pycomm.bench.support.sizes import format_size

HEADER = (
    f"{'# kernel':17} {'elements':>9} {'peer':>16} {'time (ms)':>10} {'% limit':>8} {'pycomm':>8} "
    f"{'% of a step':>12} {'host (us)':>10}"
)


@dataclass(frozen=True)
class Row:
    """One contestant in one case."""

    kernel: str
    count: int
    peer: str
    time_ms: float  # median over rounds
    best_ms: float
    limit_bytes: float  # that must be read and written
    limit_ms: float
    limit_percent: float
    ratio: float  # how many times faster pycomm is
    step_percent: float  # of the time of pycomm's dgc_step
    host_us: float  # median, until the call returned to the host
    replayed: bool = False  # as a graph


@dataclass(frozen=True)
class Missing:
    """A contestant that is left out, and why."""

    kernel: str
    peer: str
    why: str


def text(row: Row) -> str:
    """One line under HEADER."""
    return (
        f"{row.kernel:17} {format_size(row.count):>9} {row.peer:>16} {row.time_ms:>10.3f} "
        f"{row.limit_percent:>8.1f} {f'{row.ratio:.2f}x':>8} {row.step_percent:>12.1f} "
        f"{row.host_us:>10.1f}"
    )


def missing_text(missing: Missing) -> str:
    """The same for one that is left out."""
    return f"{missing.kernel:17} {'':>9} {missing.peer:>16}   left out: {missing.why}"


def store(
    path: Path, rows: Sequence[Row], missing: Sequence[Missing], settings: Mapping[str, Any]
) -> None:
    """Writes all of it as JSON."""
    content = {
        "machine": machine.describe(),
        "settings": settings,
        "rows": [asdict(row) for row in rows],
        "missing": [asdict(one) for one in missing],
    }
    summaries.write(path, content)
