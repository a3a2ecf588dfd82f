"""Runs each test file in a separate pytest process, to find dependencies between test files.

    python tools/test_alone.py [--jobs N] [--part 1/3] [tests/unit/test_x.py ...]

`make alone` runs all of them, `make alone-1` a third.

Prints a line for each file as it ends, then the last lines of those that failed. The exit status is
1 if any failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 3600.0  # of one file
NO_TESTS = 5  # pytest's exit status if no test of a file applies to this machine
SHOWN_LINES = 30


@dataclass(frozen=True)
class Result:
    path: Path
    passed: bool
    seconds: float
    text: str

    @property
    def summary(self) -> str:
        """pytest's last line, "3 passed in 2.04s", without decoration."""
        lines = self.text.strip().splitlines()
        return lines[-1].strip("= ") if lines else "no output"


def part(text: str) -> tuple[int, int]:
    """The number of a part, from 1, and the number of parts, from "1/3".

    Raises:
        argparse.ArgumentTypeError: no such part.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"invalid part: got {text!r}, expected for example 1/3")
    return int(match[1]), int(match[2])


def run(path: Path) -> Result:
    """Runs the tests of one file; a file that exceeds LIMIT_S counts as failed."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        passed, text = done.returncode in (0, NO_TESTS), done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        passed, text = False, f"not complete after {LIMIT_S:g} s"
    return Result(path, passed, time.monotonic() - begin, text)


def run_all(paths: list[Path], jobs: int) -> list[Result]:
    results = []
    with ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(run, paths):
            results.append(result)
            mark = "ok    " if result.passed else "FAILED"
            place = f"{len(results)}/{len(paths)}"
            print(f"{place:>8} {mark} {result.path.name:36} {result.seconds:6.1f} s", flush=True)
    return results


def report(results: Iterable[Result]) -> int:
    """Prints the output of failed files; returns their number."""
    failed = [result for result in results if not result.passed]
    for result in failed:
        print(f"\n{result.path.name}: {result.summary}")
        print("\n".join(result.text.splitlines()[-SHOWN_LINES:]))
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="test files (all of tests/)")
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent files")
    parser.add_argument("--part", type=part, default=(1, 1), help="every nth file, as 1/3")
    options = parser.parse_args()
    number, parts = options.part
    every = options.files or sorted((ROOT / "tests").rglob("test_*.py"))
    paths = every[number - 1 :: parts]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        parser.error(f"file not found: {', '.join(missing)}")
    results = run_all([path.resolve() for path in paths], max(1, options.jobs))
    return min(1, report(results))


if __name__ == "__main__":
    sys.exit(main())
