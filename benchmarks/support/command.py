"""The command line and the output of the benchmarks of this repository."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from pycomm.bench.support import summaries
from pycomm.bench.support.netns import RATE

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent.parent
CONSOLE = Console(width=160, soft_wrap=True, highlight=False)
LONGEST = 60  # characters of a text in a table
UNSHAPED = "none"
BITS = {"mbit": 1e6, "gbit": 1e9}


def parser(name: str, description: str | None, plot: str = "") -> argparse.ArgumentParser:
    """The command line of a benchmark, with the option --json and, to draw `plot`, --plot."""
    made = argparse.ArgumentParser(
        prog=f"pycomm bench {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=Path, help="where to store the results")
    if plot:
        made.add_argument("--plot", type=Path, help=f"where to draw {plot}")
    return made


def rates(text: str) -> list[str]:
    """The rates of links in a list such as "1gbit,none"."""
    found = [word.strip() for word in text.split(",")]
    if not all(rate == UNSHAPED or RATE.fullmatch(rate) for rate in found):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected rates like 10gbit, or {UNSHAPED}")
    return found


def bytes_s(rate: str) -> float:
    """Bytes per second of a rate such as "10gbit"."""
    return int(rate[:-4]) * BITS[rate[-4:]] / 8


def bar() -> Progress:
    """A progress bar if the output is a terminal."""
    return Progress(console=CONSOLE, disable=not CONSOLE.is_terminal, transient=True)


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
        shown = Table(*value[0], title=name, title_justify="left", box=None)
        for row in value:
            shown.add_row(*map(_text, row.values()))
        CONSOLE.print(shown)
    store(path, **content)


def store(path: Path | None, **content: Any) -> None:
    """Stores results in `path`, if there is one, with the machine."""
    if path:
        from pycomm.bench.support import machine  # imports torch, which few child processes need

        summaries.write(path, {"machine": machine.describe(), **content})


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, list):
        return "; ".join(map(_text, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:LONGEST]
