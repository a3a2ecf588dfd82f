"""`python -m pycomm demo`: trains one small model on real text, the same way over several backends.

It shows that training through torch.distributed works, that replicas agree, and its cost. Some
steps of each row follow some of another, so that other programs on the machine delay all alike. It
is not a benchmark. main() imports torch; the import of this package does not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pycomm import _command_line
from pycomm.bench.support import netns, packages, sizes

METHODS = "gloo", "pycomm", "dgc", "local", "adamw", "topk"


def main(argv: Sequence[str]) -> int:
    """Runs the demo; returns 0 if every row completed with equal replicas on all ranks."""
    parser = _command_line.parser("demo", __doc__)
    parser.add_argument("--steps", type=int, default=500, help="training steps per row")
    parser.add_argument("--processes", type=int, default=2, help="ranks, all on this machine")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of demo.json and demo.svg")
    every = ",".join(METHODS)
    parser.add_argument("--rows", type=sizes.names(METHODS), default=every, help="(%(default)s)")
    rate = 'link rate, as "100mbit": simulates one host per rank; needs root'
    parser.add_argument("--rate", default="", help=rate)
    options = parser.parse_args(argv)
    if why := packages.missing("torch", "matplotlib"):
        print(f"pycomm demo: {why}", file=sys.stderr)
        return 2
    if options.steps < 1 or options.processes < 1 or not options.rows:
        parser.error("--steps and --processes must be at least 1, and --rows one row")
    if options.rate and not netns.RATE.fullmatch(options.rate):
        parser.error(f"invalid --rate: got {options.rate}, expected for example 100mbit or 1gbit")
    if options.rate and (why := netns.missing()):
        parser.error(f"--rate {why}")
    from pycomm.demo import report

    return _command_line.ending(lambda: report.run(options))
