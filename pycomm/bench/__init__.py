"""`pycomm bench`: the benchmarks of pycomm and of comparable libraries.

Every figure comes from one run that includes the comparator and names the machine. The benchmarks
of this package run wherever pycomm is installed; the others are in `benchmarks` of the repository.
Importing this package imports neither torch nor a benchmark.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pycomm import _command_line
from pycomm.bench.support import packages


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark is, and what it measures."""

    module: str
    help: str
    draws: bool = False  # needs matplotlib; others only for --plot, which they check


BENCHMARKS = {
    "collectives": Benchmark(
        "pycomm.bench.collectives.benchmark", "collectives of pycomm, gloo, NCCL and MPI"
    ),
    "kernels": Benchmark(
        "pycomm.bench.kernels.command", "kernels of sparse training, and those of other libraries"
    ),
    "residuals": Benchmark(
        "pycomm.bench.kernels.recording", "record the data of kernels, codec and wire by training"
    ),
    "bursts": Benchmark("benchmarks.collectives.bursts", "series of collectives after a pause"),
    "pauses": Benchmark("benchmarks.collectives.pauses", "single calls of gloo after a pause"),
    "single_copy": Benchmark("benchmarks.collectives.single_copy", "reads of another process"),
    "forming": Benchmark("benchmarks.collectives.forming", "first and later groups of torch"),
    "links": Benchmark("benchmarks.collectives.links", "collectives over links of a rate", True),
    "codec": Benchmark("benchmarks.kernels.codec", "bytes and seconds of compact packets"),
    "training": Benchmark("benchmarks.training.training", "steps on each backend", True),
    "convergence": Benchmark("benchmarks.training.convergence", "loss of DGC and others", True),
    "quality": Benchmark("benchmarks.training.quality", "time to AdamW's loss, by link", True),
    "memory": Benchmark("benchmarks.training.memory", "memory of each way to train"),
    "wire": Benchmark("benchmarks.training.received_bytes", "bytes to a rank of DGC", True),
    "shared_data": Benchmark("benchmarks.training.shared_data", "costs of one copy per host"),
    "cancellation": Benchmark("benchmarks.reliability.cancellation", "Ctrl-C in every wait"),
    "check_overhead": Benchmark("benchmarks.reliability.check_overhead", "cost of checking calls"),
    "connection_flood": Benchmark(
        "benchmarks.reliability.connection_flood", "unauthenticated clients at every listener"
    ),
    "elastic": Benchmark("benchmarks.reliability.elastic", "killed ranks are replaced", True),
    "faults": Benchmark("benchmarks.reliability.faults", "fault injection in every call"),
    "gloo_failures": Benchmark("benchmarks.reliability.gloo_failures", "failures, beside gloo"),
    "rank_failure": Benchmark("benchmarks.reliability.rank_failure", "detection and recovery"),
    "reconfigure": Benchmark("benchmarks.reliability.reconfigure", "torch's, beside gloo"),
    "soak": Benchmark("benchmarks.reliability.soak", "random calls and faults for a long time"),
    "gpu": Benchmark("benchmarks.gpu.gpu", "all tests and benchmarks that need a GPU", True),
}


def main(argv: Sequence[str], command: str = "pycomm bench") -> int:
    """Runs the benchmark argv[0] with the other arguments.

    Args:
        argv: the words after the command.
        command: the command, for its help.

    Returns:
        The exit status: 2 if the benchmark is unknown or cannot run here.
    """
    words = list(argv)
    if words[:1] in (["-h"], ["--help"]):
        _parser(command).print_help()
        return 0
    if not words or words[0] not in BENCHMARKS:
        _parser(command).print_usage(sys.stderr)
        got = words[0] if words else "none"
        known = ", ".join(BENCHMARKS)
        near = _command_line.nearest(got, BENCHMARKS)
        message = f"invalid benchmark: got {got}, expected one of {known}{near}"
        print(f"{command}: {message}", file=sys.stderr)
        return 2
    name, benchmark = words[0], BENCHMARKS[words[0]]
    why = f"it is not in the package: run `python -m benchmarks {name}` in pycomm's repository"
    if packages.is_here(benchmark.module):
        why = packages.missing("torch", *(["matplotlib"] if benchmark.draws else []))
    if why:
        print(f"{command} {name}: {why}", file=sys.stderr)
        return 2
    run = importlib.import_module(benchmark.module).main
    return _command_line.ending(lambda: int(run(words[1:])))


def _parser(command: str) -> argparse.ArgumentParser:
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name:{width}}  {one.help}" for name, one in BENCHMARKS.items() if _packaged(one)]
    lines += ["", "in the repository:"]
    lines += [f"  {name:{width}}  {b.help}" for name, b in BENCHMARKS.items() if not _packaged(b)]
    text = "Runs a benchmark. BENCHMARK --help shows its options."
    made = _command_line.parser("bench", "\n".join([text, "", "benchmarks:", *lines]))
    made.prog, made.usage = command, f"{command} [-h] BENCHMARK [options]"
    return made


def _packaged(benchmark: Benchmark) -> bool:
    return benchmark.module.startswith("pycomm.")
