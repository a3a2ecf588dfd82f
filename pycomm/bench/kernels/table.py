"""The results of `bench kernels`, and their table."""

from __future__ import annotations

from dataclasses import dataclass

from pycomm._tables import Table
from pycomm.bench.support.sizes import format_size

COLUMNS = {"# kernel": "<18", "elements": ">9", "peer": ">14", "time (ms)": "9.3f"}
COLUMNS |= {"% limit": ".1f", "pycomm": ">8", "% of a step": ".1f", "host (us)": "9.1f"}


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


def add(to: Table, row: Row) -> None:
    """Adds a row to a table of COLUMNS."""
    to.add(
        *(row.kernel, format_size(row.count), row.peer, row.time_ms, row.limit_percent),
        *(f"{row.ratio:.2f}x", row.step_percent, row.host_us),
    )
