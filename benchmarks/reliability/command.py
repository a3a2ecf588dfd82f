"""The command line, the output and the child processes of the benchmarks in this folder."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from pycomm.bench.support import summaries

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent.parent
CONSOLE = Console(width=160, soft_wrap=True, highlight=False)
LIMIT_S = 120.0  # of an answer of a child process
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


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """A type of an option: some of these names, separated by commas."""

    def parse(text: str) -> list[str]:
        if bad := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"got {bad[0]!r}, expected some of {', '.join(known)}")
        return text.split(",")

    return parse


def progress(items: Collection[T], description: str) -> Iterable[T]:
    """The items, with a progress bar if the output is a terminal."""
    hidden = not CONSOLE.is_terminal
    return track(items, description, console=CONSOLE, transient=True, disable=hidden)


def timed(items: Iterable[T], minutes: float, name: str) -> Generator[T, None, None]:
    """The items, until the minutes have passed, with a progress bar over them and the number of
    items done if the output is a terminal."""
    start = time.monotonic()
    with Progress(console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal) as bar:
        task = bar.add_task("", total=minutes)
        for done, item in enumerate(items):
            if (passed := (time.monotonic() - start) / 60) >= minutes:
                break
            bar.update(task, completed=passed, description=f"{done} {name}")
            yield item


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
        from pycomm.bench.support import machine  # imports torch, which few children need

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


class Child:
    """A process of a module in this folder: it reads commands, and writes answers as lines of JSON.

    Leaving its context kills it and its descendants.
    """

    def __init__(
        self, module: str, *words: str, env: Mapping[str, str] | None = None, host: str = ""
    ) -> None:
        """Starts it, on a host of netns.py if one is named."""
        entered = ["ip", "netns", "exec", host] if host else []
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [*entered, sys.executable, "-m", f"benchmarks.reliability.{module}", *words],
            env={**os.environ, "PYTHONPATH": paths, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid  # `ip netns exec` becomes the command

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        with contextlib.suppress(BrokenPipeError):  # a command that it did not read
            self._process.communicate()

    def kill(self) -> None:
        """Kills it."""
        with contextlib.suppress(ProcessLookupError):  # all of them ended
            os.killpg(self.pid, signal.SIGKILL)

    def send(self, text: str) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process ended: answer() reports it
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()

    def answer(self, limit_s: float = LIMIT_S) -> Any:
        """The next answer. Raises RuntimeError if the process ends, or gives none in this time."""
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        timer.join()
        if not line:
            raise RuntimeError("a process ended or hung without an answer")
        return json.loads(line)

    def expect(self, wanted: str) -> None:
        """Waits for this answer. Raises RuntimeError for any other."""
        if (got := self.answer()) != wanted:
            raise RuntimeError(str(got))

    def figure(self) -> float:
        """Waits for a number. Raises RuntimeError for anything else."""
        got = self.answer()
        if not isinstance(got, int | float):
            raise RuntimeError(str(got))
        return got
