"""The command line of the benchmarks: the first word names the suite, the rest is the suite's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from benchmarks import (
    checks,
    codec,
    collectives,
    convergence,
    deaths,
    faults,
    gpu,
    interrupts,
    kernels,
    links,
    residuals,
    soak,
    strangers,
    training,
    wire,
)

SUITES: dict[str, Callable[[Sequence[str]], int]] = {
    "checks": checks.main,
    "codec": codec.main,
    "collectives": collectives.main,
    "convergence": convergence.main,
    "deaths": deaths.main,
    "faults": faults.main,
    "gpu": gpu.main,
    "interrupts": interrupts.main,
    "kernels": kernels.main,
    "links": links.main,
    "residuals": residuals.main,
    "soak": soak.main,
    "strangers": strangers.main,
    "training": training.main,
    "wire": wire.main,
}


def main(argv: Sequence[str]) -> int:
    """Runs the suite that argv[0] names; its exit status, or 2 where there is none."""
    if not argv or argv[0] not in SUITES:
        print(f"usage: python -m benchmarks {{{','.join(SUITES)}}} [options]", file=sys.stderr)
        return 2
    return SUITES[argv[0]](argv[1:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
