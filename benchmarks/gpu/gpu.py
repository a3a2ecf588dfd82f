"""`python -m benchmarks gpu`, or `make gpu`: everything that needs a GPU, part by part.

Each part is a separate command with a time limit, after which it is killed with its child
processes, so that a hanging part does not block the others. The output of a part is shown and
stored in benchmarks/results/gpu/, with a summary in gpu.json. Exits with 0 if every part succeeded,
with 1 if one failed, with 3 without a GPU. docs/internals/cuda_testing.md explains the results.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.support.command import ROOT
from pycomm import _command_line
from pycomm.bench.support import machine, summaries

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
NO_GPU = 3  # the exit status
ON_GPUS = ("group_devices", "kernel_devices")
"""Modules of tests that run a test on emulated devices and, in cases named "cuda", on GPUs."""
EMULATED = ("torch_devices",)
"""The same on emulated devices alone, with the torch that is installed."""

SANITIZERS = ("memcheck", "racecheck", "synccheck")
EXAMPLES = {
    "example-resnet": ["examples/resnet.py", "dgc", "--small"],
    "example-practices": ["examples/best_practices.py"],
    "example-reader": ["examples/reader.py", "shards"],
}


@dataclass(frozen=True)
class Part:
    """One command and its time limit."""

    name: str
    command: list[str]
    limit_s: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part; `said` is the reason of a failure."""

    name: str
    command: str
    seconds: float
    failure: str = field(default="")


def main(argv: Sequence[str]) -> int:
    """Runs the requested parts; returns the exit status."""
    parser = _command_line.parser("bench gpu", __doc__)
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts alone")
    parser.add_argument("--list", action="store_true", help="name the parts and run none")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a folder (%(default)s)")
    options = parser.parse_args(argv)
    names, why = machine.gpus()
    chosen = parts(max(1, len(names)), options.results)
    unknown = set(options.only or ()) - {part.name for part in chosen}
    if unknown:
        parser.error(f"no such part here: {', '.join(sorted(unknown))}")
    chosen = [part for part in chosen if options.only is None or part.name in options.only]
    if options.list:
        for part in chosen:
            print(f"{part.name:20} at most {part.limit_s:4.0f} s   {' '.join(part.command)}")
        return 0
    if why:
        print(f"no part was run, as no GPU can be used here: {why}", file=sys.stderr)
        return NO_GPU
    return run(chosen, options.results, names)


def parts(count: int, results: Path) -> list[Part]:
    """The parts for `count` GPUs, the short and informative ones first."""
    python = sys.executable
    ranks = min(count, 8)
    pytest = [python, "-m", "pytest", "-q", "-rf", "--tb=short", "--no-attack"]
    # Each worker starts up to four processes that initialize CUDA; more at once exceed their time
    # limits. The ranks of one process use all GPUs.
    several = ["-n", str(min(4, max(1, (os.cpu_count() or 1) // 4)))]
    own = [python, "-m", "benchmarks.gpu.gpu_ranks"]
    bench = [python, "-m", "pycomm", "bench"]
    launch = [python, "-m", "pycomm", "launch", "--nproc", str(ranks)]
    # A tool of the CUDA toolkit, which machines with a driver alone lack.
    found_at = shutil.which("compute-sanitizer")
    sanitizer = [found_at, "--error-exitcode", "9", "--tool"] if found_at else []
    kernels = [*pytest, "-k", "cuda and step", "tests/unit/test_kernels.py"]
    stored = ["--json", str(results / "kernels.json"), "--plot", str(results / "kernels.png")]
    found = [
        Part("tests", [*pytest, *several, "-k", "cuda", *tests_with(ON_GPUS)], 1500),
        Part("tests-torch", [*pytest, *several, *tests_with(EMULATED)], 600),
        Part("nccl", [*own, "alone"], 120),
        # Two ranks that share a GPU under NCCL, by each way to allow it.
        Part("shared-multi-rank", [*own, "shared", "--way", "multi-rank"], 120),
        Part("shared-host-id", [*own, "shared", "--way", "host-id"], 120),
        Part("layers", [*own, "layers", "--ranks", str(ranks)], 120),
        Part("layers-shared", [*own, "layers", "--ranks", "2", "--way", "host-id"], 120),
        Part("training", [*own, "training", "--ranks", str(ranks)], 600),
        Part("training-shared", [*own, "training", "--ranks", "2", "--way", "host-id"], 600),
        *(Part(name, [*launch, *arguments], 300) for name, arguments in EXAMPLES.items()),
        Part("top", [python, "-m", "pycomm", "top", "--once"], 60),
        *(Part(tool, [*sanitizer, tool, *kernels], 900) for tool in SANITIZERS if sanitizer),
        Part("bench-kernels", [*bench, "kernels", "--device", "cuda", *stored], 2400),
    ]
    if count < 2:
        return found
    collectives = [*bench, "collectives", "--device", "cuda", "--peers", "nccl"]
    collectives += ["--ranks", str(ranks), "--json", str(results / "collectives.json")]
    return [*found, Part("bench-collectives", collectives, 1200)]


def tests_with(modules: Sequence[str]) -> list[str]:
    """The files of tests that import one of these modules."""
    imports = re.compile(rf"^(from|import) .*\b({'|'.join(modules)})\b", re.MULTILINE)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if imports.search(file.read_text())]


def run(chosen: Sequence[Part], results: Path, names: Sequence[str]) -> int:
    """Runs the parts one after the other and stores their outcomes; 1 if one failed, else 0."""
    results.mkdir(parents=True, exist_ok=True)
    found = []
    for part in chosen:
        print(f"== {part.name}: {' '.join(part.command)}", flush=True)
        outcome = run_part(part, results / f"{part.name}.txt")
        found.append(outcome)
        print(f"== {part.name}: {outcome.failure or 'fine'}, {outcome.seconds:.0f} s", flush=True)
    outcomes = [asdict(outcome) for outcome in found]
    summaries.store(results / "gpu.json", gpus=list(names), parts=outcomes)
    failed = [outcome.name for outcome in found if outcome.failure]
    print(f"{len(found) - len(failed)} of {len(found)} parts are fine; {results} has all output")
    if failed:
        print(f"not fine: {', '.join(failed)}")
    return 1 if failed else 0


def run_part(part: Part, log: Path) -> Outcome:
    """Runs one part, its output to the screen and to `log`."""
    start = time.monotonic()
    failure = ""
    with subprocess.Popen(["tee", str(log)], stdin=subprocess.PIPE) as copy:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            stdout=copy.stdin,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            status = process.wait(part.limit_s)
            if status:
                failure = f"ended with {status}" if status > 0 else f"killed by signal {-status}"
        except subprocess.TimeoutExpired:
            failure = f"not over after {part.limit_s:.0f} s, and killed"
        finally:
            with contextlib.suppress(ProcessLookupError):  # all processes have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Outcome(part.name, " ".join(part.command), time.monotonic() - start, failure)
