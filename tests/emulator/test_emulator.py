"""The emulator finds each kind of bug in a CUDA kernel, and reports nothing else.

Each kernel of tests/emulator/micro.cu exists with and without its bug. Plain runs find bugs that
change results, and calls and addresses that no GPU would accept. ThreadSanitizer finds unordered
accesses, in any schedule. AddressSanitizer finds accesses out of bounds.
"""

import os
import re
import subprocess
from pathlib import Path

import programs
import pytest
from sanitizers import OPTIONS, fixed_addresses

pytestmark = [
    pytest.mark.skipif(programs.nvcc() is None, reason="needs nvcc, for the headers of CUDA"),
    pytest.mark.timeout(300),
]

# kernel: the run that finds its bug, and the report
MISTAKES = {
    "barrier": ("tsan", r"data race"),
    "warp_order": ("tsan", r"data race"),
    "total": ("tsan", r"data race"),
    "flag": ("tsan", r"data race"),
    "event": ("tsan", r"data race"),
    "host": ("tsan", r"data race"),
    "divergent": ("plain", r"meet at different barriers, one of them at .*micro\.cu:\d+ at "),
    "stuck": ("plain", r"deadlock(?s:.*)__ballot_sync with mask 0xffffffff at .*micro\.cu:\d+"),
    "mask": ("plain", r"a lane is not in its own mask at .*micro\.cu:\d+"),
    "spinning": ("plain", r"no progress.* at .*micro\.cu:\d+"),
    "poison": ("plain", r"nan"),
    "misaligned": ("plain", r"misaligned address at .*micro\.cu:\d+"),
    "capture": ("plain", r"an error of the emulated runtime"),
    "overflow": ("asan", r"heap-buffer-overflow"),
    "shared_overflow": ("asan", r"use-after-poison"),
}
ORDERS = (["forward"], ["reverse"], ["random", "1"], ["random", "2"])


def run(program: Path, *arguments: str, limit_s: int = 60) -> subprocess.CompletedProcess[str]:
    """Runs a program of the emulator under its sanitizer's options."""
    options = {**OPTIONS, "ASAN_OPTIONS": "detect_leaks=0"}  # stacks of fibers look like leaks
    return subprocess.run(
        [*fixed_addresses(), str(program), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        timeout=limit_s, env={**os.environ, **options}, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["plain", "tsan", "asan"])
def micro(request):
    (program,) = programs.build([f"micro.{request.param}"])
    return request.param, program


@pytest.mark.parametrize("name", MISTAKES)
def test_correct_kernel_passes(micro, name):
    _, program = micro
    done = run(program, name, "good", *(word for order in ORDERS for word in order))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(f"{name} sum") == len(ORDERS), done.stdout


@pytest.mark.parametrize("name", MISTAKES)
def test_incorrect_kernel_is_reported(name):
    kind, message = MISTAKES[name]
    (program,) = programs.build([f"micro.{kind}"])
    for order in ORDERS:
        done = run(program, name, "bad", *order)
        assert done.returncode != 0, f"{order}: not found"
        assert re.search(message, done.stdout), done.stdout
