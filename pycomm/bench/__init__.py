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

from pycomm.bench.support import packages


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark is, what it measures, and the optional packages that it needs."""

    module: str
    help: str
    needs: tuple[str, ...] = ("torch", "rich", "matplotlib")


_NO_PLOT = ("torch", "rich")  # matplotlib only for --plot, which the benchmark checks
BENCHMARKS = {
    "collectives": Benchmark(
        "pycomm.bench.collectives.benchmark",
        "collectives of pycomm, gloo, NCCL and MPI",
        _NO_PLOT,
    ),
    "kernels": Benchmark(
        "pycomm.bench.kernels.benchmark",
        "kernels of sparse training, and those of other libraries",
        _NO_PLOT,
    ),
    "residuals": Benchmark(
        "pycomm.bench.kernels.residuals",
        "record the data of kernels, codec and wire by training a model",
        _NO_PLOT,
    ),
    "bursts": Benchmark(
        "benchmarks.collectives.bursts", "short series of collectives after a pause", _NO_PLOT
    ),
    "links": Benchmark("benchmarks.collectives.links", "collectives over links of a given rate"),
    "codec": Benchmark("benchmarks.kernels.codec", "bytes and seconds of compact packets"),
    "training": Benchmark("benchmarks.training.training", "training steps on each backend"),
    "convergence": Benchmark("benchmarks.training.convergence", "loss of DGC, LocalSGD and others"),
    "quality": Benchmark("benchmarks.training.quality", "time to the loss of AdamW, by link"),
    "memory": Benchmark("benchmarks.training.memory", "memory of each way to train", _NO_PLOT),
    "wire": Benchmark("benchmarks.training.received_bytes", "bytes that a rank of DGC receives"),
    "shared_data": Benchmark(
        "benchmarks.training.shared_data", "memory and seconds of one copy per host", _NO_PLOT
    ),
    "cancellation": Benchmark(
        "benchmarks.reliability.cancellation", "Ctrl-C in every wait", _NO_PLOT
    ),
    "check_overhead": Benchmark(
        "benchmarks.reliability.check_overhead", "cost of checking calls", _NO_PLOT
    ),
    "connection_flood": Benchmark(
        "benchmarks.reliability.connection_flood",
        "unauthenticated clients at every listener",
        _NO_PLOT,
    ),
    "elastic": Benchmark("benchmarks.reliability.elastic", "killed ranks that are replaced"),
    "faults": Benchmark("benchmarks.reliability.faults", "fault injection in every call", _NO_PLOT),
    "rank_failure": Benchmark(
        "benchmarks.reliability.rank_failure", "detection and recovery", _NO_PLOT
    ),
    "reconfigure": Benchmark(
        "benchmarks.reliability.reconfigure", "torch's reconfigure, beside gloo", _NO_PLOT
    ),
    "soak": Benchmark(
        "benchmarks.reliability.soak", "random calls and faults for a long time", _NO_PLOT
    ),
    "gpu": Benchmark("benchmarks.gpu.gpu", "all tests and benchmarks that need a GPU"),
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
        print(f"{command}: invalid benchmark: got {got}, expected one of {known}", file=sys.stderr)
        return 2
    name, benchmark = words[0], BENCHMARKS[words[0]]
    why = f"it is not in the package: run `python -m benchmarks {name}` in pycomm's repository"
    if packages.is_here(benchmark.module):
        why = packages.missing(*benchmark.needs)
    if why:
        print(f"{command} {name}: {why}", file=sys.stderr)
        return 2
    return int(importlib.import_module(benchmark.module).main(words[1:]))


def _parser(command: str) -> argparse.ArgumentParser:
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name:{width}}  {one.help}" for name, one in BENCHMARKS.items() if _packaged(one)]
    lines += ["", "in the repository:"]
    lines += [f"  {name:{width}}  {b.help}" for name, b in BENCHMARKS.items() if not _packaged(b)]
    return argparse.ArgumentParser(
        prog=command,
        usage=f"{command} [-h] BENCHMARK [options]",
        description="Runs a benchmark. BENCHMARK --help shows its options.",
        epilog="\n".join(["benchmarks:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _packaged(benchmark: Benchmark) -> bool:
    return benchmark.module.startswith("pycomm.")
