"""The command line of the benchmarks: the first word is the suite, the rest its arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from benchmarks.collectives import links
from benchmarks.gpu import gpu
from benchmarks.kernels import codec
from benchmarks.reliability import (
    cancellation,
    check_overhead,
    connection_flood,
    faults,
    rank_failure,
    soak,
)
from benchmarks.training import convergence, training
from benchmarks.training import received_bytes as wire
from pycomm.bench.collectives import benchmark as collectives
from pycomm.bench.kernels import benchmark as kernels
from pycomm.bench.kernels import residuals

SUITES: dict[str, Callable[[Sequence[str]], int]] = {
    "check_overhead": check_overhead.main,
    "codec": codec.main,
    "collectives": collectives.main,
    "convergence": convergence.main,
    "rank_failure": rank_failure.main,
    "faults": faults.main,
    "gpu": gpu.main,
    "cancellation": cancellation.main,
    "kernels": kernels.main,
    "links": links.main,
    "residuals": residuals.main,
    "soak": soak.main,
    "connection_flood": connection_flood.main,
    "training": training.main,
    "wire": wire.main,
}


def main(argv: Sequence[str]) -> int:
    """Runs the suite argv[0]; returns its exit status, or 2 if it is unknown."""
    if not argv or argv[0] not in SUITES:
        print(f"usage: python -m benchmarks {{{','.join(SUITES)}}} [options]", file=sys.stderr)
        return 2
    return SUITES[argv[0]](argv[1:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
