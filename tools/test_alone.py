"""Runs each test file in a separate pytest process, to find dependencies between test files.

    python tools/test_alone.py [--jobs N] [--part 1/3]

`make alone` runs all of them, `make alone-1` a third. Prints a line for each file as it ends, and
the last lines of one that failed. The exit status is 1 if any failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 3600.0  # of one file
NO_TESTS = 5  # pytest's exit status if no test of a file applies to this machine
SHOWN_LINES = 30
PARTS = ("1/1", "1/3", "2/3", "3/3")


def run(path: Path) -> bool:
    """Runs the tests of one file; whether they passed within LIMIT_S."""
    command = ["timeout", f"{LIMIT_S:g}", sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    passed = done.returncode in (0, NO_TESTS)
    lines = [] if passed else (done.stdout + done.stderr).splitlines()[-SHOWN_LINES:]
    print("\n".join([f"{'ok    ' if passed else 'FAILED'} {path.name}", *lines]), flush=True)
    return passed


def main() -> int:
    """Runs the files of a part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="number of concurrent files")
    parser.add_argument("--part", choices=PARTS, default=PARTS[0], help="every nth file")
    options = parser.parse_args()
    number, parts = map(int, options.part.split("/"))
    with ThreadPoolExecutor(options.jobs) as pool:
        passed = pool.map(run, sorted((ROOT / "tests").rglob("test_*.py"))[number - 1 :: parts])
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
