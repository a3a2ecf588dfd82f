"""The command lines of all commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pycomm._tables import console
from pycomm.errors import Error

RESULTS = "where to store the results; a file *.csv has the rows alone"


def parser(command: str, text: str | None, plot: str | None = None) -> argparse.ArgumentParser:
    """The parser of `pycomm COMMAND`; `text` keeps its lines. That of a benchmark has --json and,
    if it draws something, --plot; `plot` is None for others."""
    made = argparse.ArgumentParser(
        prog=f"pycomm {command}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if plot is not None:
        made.add_argument("--json", type=Path, help=RESULTS)
    if plot:
        made.add_argument("--plot", type=Path, help=f"where to draw {plot}")
    return made


def numbers(
    kind: type[int] | type[float], fits: Callable[[Any], bool], expected: str
) -> Callable[[str], list[Any]]:
    """The type of an option: numbers with commas between them, each of which fits."""

    def parse(text: str) -> list[Any]:
        try:
            found = [kind(word) for word in text.split(",")]
        except ValueError:  # refused below
            found = []
        if not found or not all(map(fits, found)):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers {expected}")
        return found

    return parse


def ending(command: Callable[[], int]) -> int:
    """The exit status of a command that starts ranks: 1 if one failed, 130 after Ctrl-C."""
    try:
        return command()
    except Error as error:  # RankFailed, or that of run_ranks
        console().print(f"a rank failed\n{error}", style="red")
        return 1
    except KeyboardInterrupt:  # Ctrl-C
        console().print("interrupted")
        return 130
