"""Which lines of the CUDA kernels the cases of the emulator run.

The kernels are compiled once more for it: `make nightly` runs it.
"""

import re

import programs
import pytest
from finished import finished
from test_cuda import CASES, arguments
from test_emulator import run

pytestmark = [
    pytest.mark.skipif(programs.nvcc() is None, reason="needs nvcc"),
    pytest.mark.timeout(900),
]


def test_coverage_of_the_kernels():
    """Prints the lines that the cases run; few are not covered."""
    (program,) = programs.build(["gpu_check.coverage"])
    folder = programs.OUT / "coverage"
    for old in folder.glob("*.gcda"):
        old.unlink()
    for case in CASES:
        assert run(program, *arguments(case, "random", "3", "3"), limit_s=200).returncode == 0
    objects = [f"{unit}.o" for unit in programs.units()]
    done = finished(["gcov", "-n", *objects], cwd=folder, check=True)
    rows = re.findall(
        r"File '.*csrc/cuda/([\w.]+)'\nLines executed:([\d.]+)% of (\d+)", done.stdout
    )
    best = {}
    for name, share, lines in rows:
        best[name] = max(best.get(name, (0.0, 0)), (float(share), int(lines)))
    for name, (share, lines) in sorted(best.items()):
        print(f"{name:14} {share:6.2f} % of {lines} lines")
    hot = ("begin.cuh", "block.cuh", "decode.cuh", "pack.cuh", "search.cuh", "select.cuh")
    hot += ("update.cuh",)
    hot += tuple(f"compact_{name}.cuh" for name in ("bits", "read", "values", "write"))
    hot += ("quantize.cuh", "value_codes.cuh")
    assert {name: best[name] for name in hot if best[name][0] < 90} == {}
