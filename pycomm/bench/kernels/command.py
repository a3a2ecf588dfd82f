"""`pycomm bench kernels`: the kernels of sparse training, other libraries, and the limit.

The data are those of residuals.py. Each kernel is checked against pycomm.reference, bit by bit;
then all are timed in turn, round by round, together with torch's loops that only move memory, which
give the limit. Exits with 1 if a bit was wrong or a contestant was faster than the limit.
Contestants that cannot run are listed with the reason.

The limit of a kernel is the longest of three times: for the bytes that it reads, at the fastest
that any loop read; for those that it writes, at the fastest that any wrote; and for all of them, at
the best rate of copying and of adding. The best times are compared. Reading counts too where twice
as much is read as written, and filling in the opposite case. sparse.py defines the counted bytes.
In pycomm's repository more kernels and libraries are measured (benchmarks/kernels/comparisons.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pycomm import _command_line

SIZES = {
    "cpu": [2**18, 2**20, 2**22, 2**24],
    "cuda": [2**20, 2**22, 2**24, 25_600_000, 110_000_000, 2**28],
}
POSITIVE = _command_line.numbers(int, lambda n: n > 0, "above 0")


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns the exit status."""
    parser = _command_line.parser("bench kernels", __doc__, "the fraction of the limit")
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument(
        "--residuals", type=Path, help="of `pycomm bench residuals`; else made first"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of 5 steps each (%(default)s)")
    parser.add_argument("--sizes", type=POSITIVE, help="elements, with commas")
    parser.add_argument("--peers", help="of dgc_step, with commas (all)")
    parser.add_argument("--kernels", help="dgc_step and these, with commas (all)")
    parser.add_argument("--threads", type=int, help="(those of torch)")
    options = parser.parse_args(argv)
    options.sizes = options.sizes or SIZES[options.device]
    from pycomm.bench.kernels import benchmark  # imports torch, which --help does not need

    return benchmark.run(parser, options)
