"""A type checker finds wrong arguments of the verbs, and knows what they return."""

import sys
from pathlib import Path

import pytest
from finished import finished
from paths import ROOT

pytestmark = [pytest.mark.no_attack("starts no ranks"), pytest.mark.timeout(300)]

PROGRAM = """\
import numpy as np
import torch
import pycomm
from pycomm import Work

tensor, array = torch.ones(2), np.ones(2)
a: torch.Tensor = pycomm.all_reduce(tensor, op="avg")
b: Work[torch.Tensor] = pycomm.all_reduce(tensor, async_op=True)
c: list[torch.Tensor] = pycomm.all_gather_v(tensor, timeout_s=1.0)
d: torch.Tensor = pycomm.recv(tensor, 1, async_op=True).result()
e: torch.Tensor | None = pycomm.gather(tensor, dst=1)
pycomm.all_reduce(tensor, torch.distributed.ReduceOp.SUM, algorithm="ring")
pycomm.barrier(async_op=True).wait()
pycomm.save({}, "file")
"""
# Lines of which mypy reports one error each.
WRONG = [
    'pycomm.all_reduce(tensor, op="avgg")',
    'pycomm.all_reduce(tensor, async_op=True, op="avgg")',
    "pycomm.all_reduce([1.0])",
    "pycomm.all_reduce(tensor, group=3)",
    'pycomm.broadcast(tensor, src="0")',
    "f: torch.Tensor = pycomm.all_reduce(array)",
    "g: torch.Tensor = pycomm.all_gather(tensor, async_op=True)",
    "pycomm.all_reduce(tensor).wait()",
    "pycomm.no_such_name",
]


def test_mypy_checks_calls(tmp_path: Path) -> None:
    """A line for each wrong call, and none for the rest of the program. It is outside the
    repository, so the package is found where it is installed, as editors do."""
    program = tmp_path / "program.py"
    program.write_text("\n".join([PROGRAM, *WRONG]))
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={ROOT}/build/mypy", program]
    done = finished(command, cwd=tmp_path)
    lines = program.read_text().splitlines()
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = [lines[int(line.split(":")[1]) - 1] for line in errors]
    assert found == WRONG, done.stdout + done.stderr
