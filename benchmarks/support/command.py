"""The command line and the output of the benchmarks of this repository."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import Progress, track

from pycomm import _command_line
from pycomm._tables import Table, console
from pycomm.bench.support import summaries
from pycomm.bench.support.netns import RATE
from pycomm.bench.support.sizes import names

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent.parent
CONSOLE = console()
LONGEST = 60  # characters of a text in a table
UNSHAPED = "none"
BITS = {"mbit": 1e6, "gbit": 1e9}


def parser(
    name: str, description: str | None, plot: str = "", **counts: tuple[float, str]
) -> argparse.ArgumentParser:
    """The command line of a benchmark, with the option --json and, to draw `plot`, --plot. `counts`
    are options with a number: by name its default value, and a text for --help."""
    made = _command_line.parser(f"bench {name}", description, plot)
    for option, (usual, text) in counts.items():
        flag = f"--{option.replace('_', '-')}"
        made.add_argument(flag, type=type(usual), default=usual, help=f"{text} (%(default)s)")
    return made


def add_names(
    to: argparse.ArgumentParser, option: str, known: Iterable[str], usual: Iterable[str]
) -> None:
    """Adds an option with names of `known`, or patterns of them."""
    chosen, every = ",".join(usual), ",".join(known)
    text = every if chosen == every else f"(%(default)s) of {every}"
    to.add_argument(f"--{option}", type=names(known), default=chosen, help=text)


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


def chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """These options, as settings of a run."""
    return {name: getattr(options, name) for name in names}


def by_case(size: int, show: Callable[[list[Any]], object]) -> Callable[[int, Any], None]:
    """An `on_message` of processes.run for ranks that report case after case: show(reports), in
    rank order, as soon as all ranks have reported a case."""
    waiting: list[list[Any]] = [[] for _ in range(size)]

    def on_message(rank: int, reported: Any) -> None:
        waiting[rank].append(reported)
        while all(waiting):
            show([of.pop(0) for of in waiting])

    return on_message


def median_and_worst(name: str, ms: Sequence[float]) -> dict[str, float]:
    """The fields `name`_ms and `name`_worst_ms."""
    return {f"{name}_ms": statistics.median(ms), f"{name}_worst_ms": max(ms)}


def report(path: Path | None, **content: Any) -> None:
    """Prints results, lists of rows as tables, and stores them in `path` with the machine."""
    for name, value in content.items():
        if not (isinstance(value, list) and value and isinstance(value[0], dict)):
            CONSOLE.print(f"{name}: {_text(value)}")
            continue
        shown = Table(dict.fromkeys(value[0], ""), name)
        for row in value:
            shown.add(*map(_text, row.values()))
        CONSOLE.print(shown)
    summaries.store(path, **content)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, list):
        return "; ".join(map(_text, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:LONGEST]
