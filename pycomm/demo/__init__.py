"""`python -m pycomm demo`: trains one small model on real text, the same way over several backends.

Not a benchmark: it shows that training through torch.distributed works, agrees and what it costs.
main() is called by pycomm.__main__; torch is imported inside it, never by importing this package.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Runs the demo; 0 when every row ran and left equal replicas on all ranks."""
    from pycomm.demo import rows

    parser = argparse.ArgumentParser(prog="pycomm demo", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=500, help="training steps per row")
    parser.add_argument("--processes", type=int, default=2, help="ranks, all on this machine")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of demo.json and demo.png")
    parser.add_argument(
        "--rows", default=",".join(rows.ROWS), help="which ways, by comma (%(default)s)"
    )
    options = parser.parse_args(argv)
    chosen = [key.strip() for key in options.rows.split(",")]
    for key in chosen:
        if key not in rows.ROWS:
            parser.error(f"no row {key!r}: choose among {', '.join(rows.ROWS)}")
    if options.steps < 1 or options.processes < 1:
        parser.error("--steps and --processes must be at least 1")

    from pycomm.demo.show import show

    return show([rows.ROWS[key] for key in chosen], options.steps, options.processes, options.out)
