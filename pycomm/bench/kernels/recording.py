"""`pycomm bench residuals FILE`: residuals and gradients as real training leaves them.

They are not a Gaussian tail: elements above the last threshold were sent a step ago, so many are
just below it. Eight workers train a character-level transformer on the source of the standard
library with DGC at 0.1 %. After 500 steps the state of each is recorded, window by window: u and v
at its beginning, and the gradients and packets of its steps. The concatenated windows of all
workers are the large arrays of `bench kernels`.

Each worker has its own gradients; arithmetic is torch's and `pycomm.kernels`'. The hash of the
recording is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pycomm import _command_line


def main(argv: Sequence[str]) -> int:
    """Records, stores, prints the hash."""
    parser = _command_line.parser("bench residuals", __doc__)
    parser.add_argument("file", type=Path, help="where to store them, .npz, about 550 MB")
    options = parser.parse_args(argv)
    from pycomm.bench.kernels.residuals import STEPS, record, store  # imports torch

    found = record()
    store(found, options.file)
    print(f"{options.file}: {found.u.size} elements, {STEPS} steps, SHA-256 {found.digest}")
    return 0
