"""`python -m benchmarks` is `pycomm bench`: the first word is the benchmark."""

from __future__ import annotations

import sys

from pycomm.bench import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], "python -m benchmarks"))
