"""PyTorch's own distributed suite (torch.testing._internal.distributed.distributed_test) with any
backend, each test on --world-size forked processes.

    python tests/compat/torch_suite.py --backend pycomm --world-size 3 [--only REGEX] [--json FILE]

For an unknown backend the suite skips two tests of three: its decorators decide by lists of backend
names and by the world size. Here those decorators do nothing. excluded.txt lists the tests that do
not run and why; all others run. No file of torch is changed. With --cuda-as-cpu the tests that need
a GPU run too, see cuda_as_cpu.py.

The exit status is 1 if a test that ran did not pass. Needs torch's test dependency expecttest.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

SUITE = "torch.testing._internal.distributed.distributed_test"
LEFT_OUT = Path(__file__).with_name("excluded.txt")
LISTED_FOR = "2.13."  # the torch whose tests it names; other versions may lack some
GROUP_LIMIT_S = 30  # the timeout of the tests' process groups
GRACE_S = 1.0  # for the other ranks to report after one failed

PASSED, FAILED, CRASHED, LATE, SKIPPED = "passed", "failed", "crashed", "timed out", "left out"


@dataclass(frozen=True)
class Options:
    """The command-line options."""

    backend: str
    module: str  # registers the backend when imported; may be empty
    world_size: int
    cuda_as_cpu: bool
    timeout_s: float  # of one test
    only: str


@dataclass(frozen=True)
class Outcome:
    """The result of one test."""

    status: str
    reason: str = ""
    seconds: float = 0.0


def needs() -> dict[str, tuple[set[str], str]]:
    """excluded.txt: for each test in it the requirement and the reason."""
    lines = [x for x in LEFT_OUT.read_text().splitlines() if not x.startswith("#")]
    return {name: (set(need.split()), why) for name, need, why in (x.split(" | ") for x in lines)}


def missing(needed: set[str], options: Options) -> set[str]:
    """The requirements that this run does not meet."""
    size = options.world_size
    there = {
        "gpu": options.cuda_as_cpu,
        "3+": size >= 3,
        "4+": size >= 4,
        "4": size == 4,
        "even": size % 2 == 0,
        "never": False,
    }
    return {name for name in needed if not there[name]}


def load(options: Options) -> ModuleType:
    """The suite's module for this backend, without its decorators that skip tests."""
    os.environ.update(
        BACKEND=options.backend, WORLD_SIZE=str(options.world_size), MASTER_ADDR="127.0.0.1"
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.module:
        importlib.import_module(options.module)
    # These are in two modules, and the suite imports them by name.
    from torch.testing._internal import common_distributed as ranks
    from torch.testing._internal import common_utils as utils

    for module in (utils, ranks):
        module.skip_but_pass_in_sandcastle = _no_decorator
        module.skip_but_pass_in_sandcastle_if = _no_decorator
    ranks.skip_if_lt_x_gpu = ranks.requires_nccl_version = _no_decorator
    ranks.skip_if_no_gpu = ranks.skip_if_small_worldsize = _unchanged
    ranks.skip_if_odd_worldsize = _unchanged
    suite: Any = importlib.import_module(SUITE)
    # Whether events are checked, and the branch of one helper, also depend on the name.
    suite.PROFILING_SUPPORTED_BACKENDS.append(options.backend)
    suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(options.backend)
    suite.default_pg_timeout = GROUP_LIMIT_S
    base = suite.DistributedTest._DistTestBase
    helper = base._test_accumulate_gradients_no_sync

    def on_the_cpu(*args: Any, **kwargs: Any) -> None:
        suite.BACKEND = "gloo"
        try:
            helper(*args, **kwargs)
        finally:
            suite.BACKEND = options.backend

    base._test_accumulate_gradients_no_sync = on_the_cpu
    return suite


def _unchanged(test: Any) -> Any:
    return test


def _no_decorator(*_args: Any, **_kwargs: Any) -> Any:
    """Replaces a decorator with arguments."""
    return _unchanged


class Runner:
    """Runs single tests. The parent process creates no group and no thread, so that it can fork."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.suite: Any = load(options)
        self.ranks: Any = importlib.import_module("torch.testing._internal.common_distributed")
        self.needs = needs()
        bases = (self.suite.TestDistBackend, self.suite.DistributedTest._DistTestBase)
        self.tests = type("Suite", bases, {})
        self.names = sorted(name for name in dir(self.tests) if name.startswith("test_"))
        unknown = set(self.needs) - set(self.names)
        if unknown and self.ranks.torch.__version__.startswith(LISTED_FOR):
            raise ValueError(f"{LEFT_OUT.name} names unknown tests: {sorted(unknown)}")

    def run(self, name: str) -> Outcome:
        """Runs one test. All its processes have ended when this returns."""
        needed, why = self.needs.get(name, (set(), ""))
        if lacking := missing(needed, self.options):
            return Outcome(SKIPPED, f"needs {', '.join(sorted(lacking))}: {why}")
        start = time.monotonic()
        self.ranks.initialize_temp_directories()
        self.suite.Barrier.init()
        try:
            with tempfile.TemporaryDirectory() as folder:
                outcome = self._run(name, Path(folder))
        finally:
            self.ranks.cleanup_temp_dir()
        return Outcome(outcome.status, outcome.reason, round(time.monotonic() - start, 2))

    def _run(self, name: str, folder: Path) -> Outcome:
        context = multiprocessing.get_context("fork")
        processes, pipes = [], []
        for rank in range(self.options.world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=self._child, args=(rank, name, folder, theirs), name=f"rank {rank}"
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        try:
            in_time = self._wait(processes)
            ended = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        answers = [_last(pipe) for pipe in pipes]
        printed = [(folder / f"rank{r}").read_text(errors="replace") for r in range(len(answers))]
        return self._judge(in_time, ended, [a or b for a, b in zip(answers, printed, strict=True)])

    def _wait(self, processes: Sequence[BaseProcess]) -> bool:
        """Waits until all ended, or until GRACE_S after a failure; False: timed out."""
        end = time.monotonic() + self.options.timeout_s
        failed = False
        while running := [p.sentinel for p in processes if p.exitcode is None]:
            if not failed and any(p.exitcode for p in processes):
                failed, end = True, min(end, time.monotonic() + GRACE_S)
            if not wait(running, max(0.0, end - time.monotonic())):
                return failed
        return True

    def _child(self, rank: int, name: str, folder: Path, pipe: Connection) -> None:
        """The main function of a rank: torch's side of the test, its output in a file."""
        import torch

        with (folder / f"rank{rank}").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        torch.set_num_threads(1)
        self.suite.INIT_METHOD = f"file://{folder / 'again'}"  # of a test that makes a second group
        if self.options.cuda_as_cpu and "gpu" in self.needs.get(name, (set(), ""))[0]:
            cuda_as_cpu: Any = importlib.import_module("cuda_as_cpu")
            cuda_as_cpu.install(self.suite, self.options.world_size)
        tests: Any = self.tests
        tests._run(rank, name, str(folder / "store"), pipe)

    def _judge(self, in_time: bool, ended: list[int | None], output: list[str]) -> Outcome:
        codes = set(ended)
        if not in_time:
            late = [rank for rank, code in enumerate(ended) if code is None]
            return Outcome(LATE, f"ranks {late} not ready after {self.options.timeout_s:g} s")
        if codes == {0}:
            return Outcome(PASSED)
        for skip in self.ranks.TEST_SKIPS.values():
            if codes == {skip.exit_code}:
                return Outcome(SKIPPED, f"skips itself: {skip.message}")
        # When a rank dies, others fail as well: its exit status is the cause.
        first = min((c for c in codes if c is not None and c < 0), default=None)
        if first is not None:
            rank = ended.index(first)
            name = signal.Signals(-first).name
            return Outcome(CRASHED, f"rank {rank} ended by {name}; {_cause(output[rank])}")
        rank = next(r for r, code in enumerate(ended) if code)
        return Outcome(FAILED, f"rank {rank}: {_cause(output[rank])}")


def _last(pipe: Connection) -> str:
    """The traceback that a rank sent before it ended, or ""."""
    with contextlib.suppress(EOFError, OSError):  # it ended without one
        if pipe.poll(0):
            return str(pipe.recv())
    return ""


def _cause(text: str) -> str:
    """The line with the error in a rank's output, else the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(?:[a-z_]\w*\.)*[A-Z]\w+: ", line)]
    return (errors or lines or ["nothing said"])[-1].strip()[:240]


def chosen(runner: Runner) -> list[str]:
    return [name for name in runner.names if re.search(runner.options.only, name)]


def show(runner: Runner, names: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    """Runs the tests under a progress bar; prints a line for each that did not pass."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(soft_wrap=True, highlight=False)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[test]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(names), test="")
        for name in names:
            bar.update(task, test=name)
            bar.refresh()
            try:
                outcome = runner.run(name)
            except OSError:  # counted as failed, with its text
                outcome = Outcome(FAILED, traceback.format_exc(limit=-1).splitlines()[-1])
            bar.advance(task)
            if outcome.status not in (PASSED, SKIPPED):
                line = f"{outcome.status:9}  {outcome.seconds:5.1f} s  {name}  {outcome.reason}"
                console.print(line, markup=False)
            yield name, outcome


def write(path: str, options: Options, outcomes: dict[str, Outcome], seconds: float) -> None:
    """Counts, the machine, and each test that ran and did not pass."""
    import torch

    from pycomm.bench.support import summaries
    from pycomm.bench.support.machine import describe

    content = {
        "machine": describe(),
        "torch": torch.__version__,
        "options": asdict(options),
        "totals": Counter(outcome.status for outcome in outcomes.values()),
        "seconds": round(seconds, 1),
        "left_out": Counter(
            outcome.reason for outcome in outcomes.values() if outcome.status == SKIPPED
        ),
        "tests": {
            name: asdict(outcome)
            for name, outcome in outcomes.items()
            if outcome.status not in (PASSED, SKIPPED)
        },
    }
    summaries.write(Path(path), content)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--backend", default="pycomm", help="its name in torch.distributed")
    made.add_argument("--module", help="registers the backend when imported")
    made.add_argument("--world-size", type=int, default=3, help="ranks of each test")
    made.add_argument("--cuda-as-cpu", action="store_true", help="GPU tests too, on CPU tensors")
    made.add_argument("--only", default="", metavar="REGEX", help="tests whose names match")
    made.add_argument("--timeout", type=float, default=180, help="seconds for one test")
    made.add_argument("--json", metavar="FILE", help="write the results there")
    made.add_argument("--list", action="store_true", help="show what would run, and run nothing")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs, prints, stores; 0 if all that ran passed."""
    given = parser().parse_args(argv)
    module = given.module
    if module is None:
        module = "pycomm.torch_backend" if given.backend == "pycomm" else ""
    options = Options(
        backend=given.backend,
        module=module,
        world_size=given.world_size,
        cuda_as_cpu=given.cuda_as_cpu,
        timeout_s=given.timeout,
        only=given.only,
    )
    if options.world_size < 2:
        parser().error("at least 2 ranks are needed")
    runner = Runner(options)
    names = chosen(runner)
    if given.list:
        for name in names:
            needed, why = runner.needs.get(name, (set(), ""))
            print(f"{name}  {f'left out: {why}' if missing(needed, options) else 'runs'}")
        return 0
    start = time.monotonic()
    outcomes = dict(show(runner, names))
    seconds = time.monotonic() - start
    totals = Counter(outcome.status for outcome in outcomes.values())
    counts = ", ".join(f"{totals[status]} {status}" for status in totals)
    kind = ", GPU tests on the CPU" if options.cuda_as_cpu else ""
    print(f"{options.backend}, {options.world_size} processes{kind}: {counts}; {seconds:.0f} s")
    if given.json:
        write(given.json, options, outcomes, seconds)
    return 0 if set(totals) <= {PASSED, SKIPPED} and totals[PASSED] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
