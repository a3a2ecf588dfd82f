"""Fuzzes every parser of bytes from outside and shows what was found.

    python tests/fuzz/hunt.py [--seconds 60] [--targets frames,store] [--keep]

Each target (tests/fuzz/*_fuzz.cpp) begins with its corpus, tests/fuzz/corpus/<target>/, and looks
for new inputs for --seconds; a progress bar runs meanwhile, and a table follows. The exit status is
1 if something was found. An input that breaks a target is stored in build/fuzz/found/.
--keep: puts those inputs into the corpus that reach code which no other reaches.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fuzzers import HERE, ROOT, BuildFailed, build, targets

CORPUS = HERE / "corpus"
FOUND = ROOT / "build" / "fuzz" / "found"
SLOWEST_S = 5  # of one input, which takes some 1 to 1000 us: more is a find
MOST_MB = 512  # of memory
LOOK_S = 0.25  # between two looks at a fuzzer that runs


@dataclass(frozen=True)
class Report:
    """The outcome of one target."""

    target: str
    inputs: int  # tried
    kept: int  # in the corpus
    reached: int  # edges of code
    find: str  # what was found, or nothing


def fuzz(target: str, binary: Path, seconds: int, more: Path) -> Report:
    """Replays the corpus, then looks for `seconds` s; new inputs are left in the folder `more`."""
    corpus = CORPUS / target
    FOUND.mkdir(parents=True, exist_ok=True)
    limits = [f"-timeout={SLOWEST_S}", f"-rss_limit_mb={MOST_MB}", "-print_final_stats=1"]
    limits += [f"-max_total_time={seconds}"] if seconds else ["-runs=0"]
    # Through a shell: libFuzzer limits its peak memory, which starts at that of the process that
    # forked it.
    command = ["sh", "-c", '"$0" "$@"; exit $?', str(binary), *limits]
    command += [f"-artifact_prefix={FOUND}/{target}-", str(more), str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    stderr = done.stderr
    reached = [int(n) for n in re.findall(r"\bcov: (\d+)", stderr)]
    tried = re.search(r"number_of_executed_units: (\d+)", stderr)
    find = ""
    if done.returncode != 0:
        why = re.search(r"FOUND: .*|ERROR: .*|runtime error: .*", stderr)
        find = why.group() if why else f"it ended with {done.returncode}: {stderr[-500:]}"
    kept = len(list(corpus.iterdir()))
    return Report(target, int(tried[1]) if tried else 0, kept, max(reached, default=0), find)


def keep(target: str, binary: Path, more: Path) -> None:
    """Adds the inputs of `more` that reach new code to the corpus."""
    with tempfile.TemporaryDirectory() as merged:
        command = [str(binary), "-merge=1", merged, str(CORPUS / target), str(more)]
        subprocess.run(command, capture_output=True, check=True)
        shutil.rmtree(CORPUS / target)
        shutil.copytree(merged, CORPUS / target)


def while_waiting(target: str, seconds: int, work: Callable[[], Report]) -> Report:
    """Calls `work` on a thread and draws the expected progress."""
    from concurrent.futures import ThreadPoolExecutor

    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:10}"), BarColumn(), TimeRemainingColumn())
    with ThreadPoolExecutor(1) as pool, Progress(*columns, transient=True) as progress:
        bar = progress.add_task(target, total=seconds)
        running = pool.submit(work)
        begin = time.monotonic()
        while not running.done():
            progress.update(bar, completed=min(time.monotonic() - begin, seconds))
            time.sleep(LOOK_S)  # only the bar waits for it
        return running.result()


def main() -> None:
    """The command line: see the head of this file."""
    parser = argparse.ArgumentParser(description="Fuzzes every parser of bytes from outside.")
    parser.add_argument("--seconds", type=int, default=60, help="of each target (default 60)")
    parser.add_argument("--targets", default=",".join(targets()), help="names, with commas")
    parser.add_argument("--keep", action="store_true", help="add to the corpus what reaches more")
    options = parser.parse_args()
    names = options.targets.split(",")
    if unknown := set(names) - set(targets()):
        sys.exit(f"{', '.join(sorted(unknown))}: not among {', '.join(targets())}")
    try:
        binaries = build(names)
    except BuildFailed as error:  # the compiler's text, without a traceback
        sys.exit(f"pycomm: {error}")
    reports = []
    for target, binary in zip(names, binaries, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            more = Path(folder)
            work = partial(fuzz, target, binary, options.seconds, more)
            found = while_waiting(target, options.seconds, work)
            if options.keep and not found.find:
                keep(target, binary, more)
        reports.append(found)
    print(f"{'target':10} {'inputs':>10} {'corpus':>7} {'edges':>6}  found")
    for one in reports:
        shown = one.find or "nothing"
        print(f"{one.target:10} {one.inputs:10,} {one.kept:7} {one.reached:6}  {shown}")
    if any(one.find for one in reports):
        sys.exit(f"the inputs are in {os.path.relpath(FOUND)}")


if __name__ == "__main__":
    main()
