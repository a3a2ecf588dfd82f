"""`python -m benchmarks gpu`, or `make gpu`: everything that needs a GPU, part by part.

Each part is a separate command with a time limit, after which it is killed with its child
processes, so that a hanging part does not block the others. The output of a part is shown and
stored in benchmarks/results/gpu/, with a summary in gpu.json after each part, so that a run that is
cut loses nothing. Exits with 0 if every part succeeded, with 1 if one failed, with 3 without a GPU.
docs/internals/cuda_testing.md explains the results.

With `--budget` the parts run in the order of their value. A part starts if its share of the time is
left, and is killed at the end of its share.
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

GPU_CHECK = ROOT / "build" / "emulator" / "gpu_check"
NCU = ["ncu", "--clock-control", "none", "--launch-count", "200", "--section", "SpeedOfLight"]
SANITIZERS = ("memcheck", "racecheck", "synccheck")
EXAMPLES = {
    "example-resnet": ["examples/resnet.py", "dgc", "--small"],
    "example-practices": ["examples/best_practices.py"],
    "example-reader": ["examples/reader.py", "shards"],
}


@dataclass(frozen=True)
class Part:
    """One command and its time limit.

    share_s: its limit with a budget. None: limit_s. missing: why it cannot run here.
    """

    name: str
    command: list[str]
    limit_s: float
    share_s: float | None = None
    missing: str = ""

    def limit(self, left_s: float | None) -> float:
        """Its limit without a budget, or with what is left of one."""
        return self.limit_s if left_s is None else self.share_s or self.limit_s


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part; `left_out` is the reason why it did not start."""

    name: str
    command: str
    seconds: float
    failure: str = field(default="")
    left_out: str = field(default="")


def main(argv: Sequence[str]) -> int:
    """Runs the requested parts; returns the exit status."""
    parser = _command_line.parser("bench gpu", __doc__)
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts alone")
    parser.add_argument("--list", action="store_true", help="name the parts and run none")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a folder (%(default)s)")
    parser.add_argument("--budget", type=float, metavar="S", help="end after so many seconds")
    parser.add_argument(
        "--since", type=float, metavar="T", help="when the budget began, in seconds since 1970"
    )
    options = parser.parse_args(argv)
    ends = None
    if options.budget is not None:
        passed = 0.0 if options.since is None else time.time() - options.since
        ends = time.monotonic() + options.budget - passed
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
    return run(chosen, options.results, names, ends)


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
    stored = ["--json", str(results / "kernels.json"), "--plot", str(results / "kernels.svg")]
    pair = ["--ranks", str(ranks)] if count > 1 else ["--ranks", "2", "--way", "host-id"]
    steps = [python, "-m", "benchmarks.gpu.gpu_steps"]
    # With a budget the worker that meets a hang ends after a minute.
    tests = [*pytest, *several, "--timeout", "60", "-k", "cuda", *tests_with(ON_GPUS)]
    found = [
        _with_kernels("bits", [], ["--bits"], 300, 60),
        Part("kills", [python, "-m", "benchmarks.gpu.gpu_kills", *pair[2:]], 300, 100),
        Part("tests", tests, 1500, 150),
        _with_kernels("times", [], ["--time"], 300, 60),
        Part("calls", [*steps, "calls", *pair], 300, 60),
        Part("steps", [*steps, "steps", *pair], 600, 120),
        Part("memory", [*steps, "memory", *pair], 120, 40),
        *(
            _with_kernels(
                tool,
                ["compute-sanitizer", "--error-exitcode", "9", "--tool", tool],
                ["--bits", "brief", "packets", "quantize", "groups", "--small"],
                900,
                50,
            )
            for tool in SANITIZERS
        ),
        _with_kernels(
            "ncu",
            [*NCU],
            ["--time", "dgc_step_warm", "topk", "quantize_3", "dequantize_3", "--small"],
            300,
            60,
        ),
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
        Part("bench-kernels", [*bench, "kernels", "--device", "cuda", *stored], 2400),
    ]
    if count < 2:
        return found
    collectives = [*bench, "collectives", "--device", "cuda", "--peers", "nccl"]
    collectives += ["--ranks", str(ranks), "--json", str(results / "collectives.json")]
    return [*found, Part("bench-collectives", collectives, 1200)]


def _with_kernels(
    name: str, tool: list[str], arguments: list[str], limit_s: float, share_s: float
) -> Part:
    """A part that runs gpu_check, under this tool of the CUDA toolkit if there is one."""
    missing = "" if GPU_CHECK.exists() else "tests/emulator/programs.py has not built gpu_check"
    if tool and not shutil.which(tool[0]):
        missing = f"{tool[0]} is not on PATH"
    return Part(name, [*tool, str(GPU_CHECK), *arguments], limit_s, share_s, missing)


def tests_with(modules: Sequence[str]) -> list[str]:
    """The files of tests that import one of these modules."""
    imports = re.compile(rf"^(from|import) .*\b({'|'.join(modules)})\b", re.MULTILINE)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if imports.search(file.read_text())]


def run(
    chosen: Sequence[Part], results: Path, names: Sequence[str], ends: float | None = None
) -> int:
    """Runs the parts one after the other and stores their outcomes; 1 if one failed, else 0.

    `ends`: of time.monotonic(), when the budget is used up.
    """
    results.mkdir(parents=True, exist_ok=True)
    found: list[Outcome] = []
    for part in chosen:
        left_s = None if ends is None else ends - time.monotonic()
        limit_s = part.limit(left_s)
        why = part.missing
        if not why and left_s is not None and limit_s > left_s:
            why = f"needs {limit_s:.0f} s, and {max(0.0, left_s):.0f} s are left"
        if why:
            outcome = Outcome(part.name, " ".join(part.command), 0.0, left_out=why)
        else:
            print(f"== {part.name}: {' '.join(part.command)}", flush=True)
            outcome = run_part(part, results / f"{part.name}.txt", limit_s)
        found.append(outcome)
        said = (
            f"left out: {why}" if why else f"{outcome.failure or 'fine'}, {outcome.seconds:.0f} s"
        )
        print(f"== {part.name}: {said}", flush=True)
        outcomes = [asdict(outcome) for outcome in found]
        summaries.store(results / "gpu.json", gpus=list(names), parts=outcomes)
    failed = [outcome.name for outcome in found if outcome.failure]
    ran = [outcome for outcome in found if not outcome.left_out]
    print(f"{len(ran) - len(failed)} of {len(ran)} parts are fine; {results} has all output")
    if failed:
        print(f"not fine: {', '.join(failed)}")
    if left_out := [outcome.name for outcome in found if outcome.left_out]:
        print(f"left out: {', '.join(left_out)}")
    return 1 if failed else 0


def run_part(part: Part, log: Path, limit_s: float) -> Outcome:
    """Runs one part, its output to the screen and to `log`; kills it after `limit_s`."""
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
            status = process.wait(limit_s)
            if status:
                failure = f"ended with {status}" if status > 0 else f"killed by signal {-status}"
        except subprocess.TimeoutExpired:
            failure = f"not over after {limit_s:.0f} s, and killed"
        finally:
            with contextlib.suppress(ProcessLookupError):  # all processes have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Outcome(part.name, " ".join(part.command), time.monotonic() - start, failure)
