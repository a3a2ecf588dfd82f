"""The command line and the output of the benchmarks in this folder."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

from pycomm.bench.support import summaries

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent.parent
CONSOLE = Console(width=160, soft_wrap=True, highlight=False)
LONGEST = 60  # characters of a text in a table


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The command line of a benchmark, with the option --json."""
    made = argparse.ArgumentParser(
        prog=f"pycomm bench {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=Path, help="where to store the results")
    return made


def progress(items: Iterable[T], description: str) -> Iterable[T]:
    """The items, with a progress bar if the output is a terminal."""
    hidden, total = not CONSOLE.is_terminal, len(items) if isinstance(items, Sized) else None
    return track(items, description, total, console=CONSOLE, transient=True, disable=hidden)


def report(path: Path | None, **content: Any) -> None:
    """Prints results, lists of rows as tables, and stores them in `path` with the machine."""
    for name, value in content.items():
        if not (isinstance(value, list) and value and isinstance(value[0], dict)):
            CONSOLE.print(f"{name}: {_text(value)}", markup=False)
            continue
        shown = Table(*value[0], title=name)
        for row in value:
            shown.add_row(*map(_text, row.values()))
        CONSOLE.print(shown)
    if path:
        from pycomm.bench.support import machine  # imports torch, which few child processes need

        summaries.write(path, {"machine": machine.describe(), **content})


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, list):
        return "; ".join(map(_text, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:LONGEST]


def free_port() -> int:
    """A free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
