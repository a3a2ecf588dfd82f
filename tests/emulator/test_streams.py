"""The stream engine without a GPU: plans over the fake NCCL on emulated streams.

The cases are in the files programs.STREAMS. Each runs plain, and each day under one sanitizer.
"""

import re

import programs
import pytest
from sample import of_the_day
from test_emulator import run

pytestmark = [
    pytest.mark.skipif(programs.nvcc() is None, reason="needs nvcc, for the headers of CUDA"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("kind", ["plain", *of_the_day(["tsan", "asan"], 2)])
def test_plans_run_on_streams(kind):
    (program,) = programs.build([f"streams.{kind}"])
    done = run(program, limit_s=500)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"^3\d passed, 0 failed$", done.stdout, re.MULTILINE), done.stdout
