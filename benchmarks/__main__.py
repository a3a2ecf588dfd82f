"""The command line of the benchmarks: the first word is the suite, the rest its arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from benchmarks import (
    cancellation,
    check_overhead,
    codec,
    collectives,
    connection_flood,
    convergence,
    faults,
    gpu,
    kernels,
    links,
    rank_failure,
    residuals,
    soak,
    training,
    wire,
)

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
