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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 3600.0  # of one file
NO_TESTS = 5  # pytest's exit status if no test of a file applies to this machine
SHOWN_LINES = 30


def part(text: str) -> tuple[int, int]:
    """The number of a part, from 1, and the number of parts, from "1/3".

    Raises:
        argparse.ArgumentTypeError: no such part.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"invalid part: got {text!r}, expected for example 1/3")
    return int(match[1]), int(match[2])


def run(path: Path) -> tuple[bool, float, str]:
    """Runs the tests of one file: whether they passed, seconds, output. A file that exceeds LIMIT_S
    counts as failed."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        passed, text = done.returncode in (0, NO_TESTS), done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        passed, text = False, f"not complete after {LIMIT_S:g} s"
    return passed, time.monotonic() - begin, text


def run_all(paths: list[Path], jobs: int) -> list[str]:
    """Runs the files; returns the name of each that failed, with its last lines."""
    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        found = zip(paths, pool.map(run, paths), strict=True)
        for number, (path, (passed, seconds, text)) in enumerate(found, 1):
            place, mark = f"{number}/{len(paths)}", "ok    " if passed else "FAILED"
            print(f"{place:>8} {mark} {path.name:36} {seconds:6.1f} s", flush=True)
            if not passed:
                failed.append("\n".join([f"\n{path.name}:", *text.splitlines()[-SHOWN_LINES:]]))
    return failed


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
    failed = run_all([path.resolve() for path in paths], max(1, options.jobs))
    for text in failed:
        print(text)
    return min(1, len(failed))


if __name__ == "__main__":
    sys.exit(main())
