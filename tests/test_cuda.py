"""CUDA's kernels without a GPU: under sanitizers, and with mistakes planted in them.

tests/test_kernels.py holds what they compute to the reference, bit by bit. Here: no data race, no
access outside, whatever the order of blocks; every planted mistake is found; the bytes and launches
of a step. None of this has run on a GPU.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "emulator"))
import programs
from mistakes import MISTAKES
from test_emulator import run

from pycomm import kernels
from pycomm.kernels import devices

pytestmark = [
    pytest.mark.skipif(programs.nvcc() is None, reason="needs nvcc"),
    pytest.mark.timeout(900),
]

CASES = ["topk", "step", "brief", "infinity", "packets", "dense"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["plain", "asan", "tsan"])
def test_kernels_are_right_and_sound(kind, case):
    (program,) = programs.build([f"cases.{kind}"])
    orders = [["random", "5", "3"]]
    if kind == "plain":
        orders += [["forward"], ["reverse"], ["random", "6", "1"], ["random", "7", "9"]]
    for order in orders:
        done = run(program, case, *order, limit_s=300)
        assert done.stdout.endswith("right\n"), done.stdout[-4000:]
        assert done.returncode == 0


@pytest.fixture(scope="module")
def planted():
    """Builds all mutants at once."""
    mutants = [mutant for mutant, _, _ in MISTAKES.values()]
    return programs.build([f"mutants/{m.name}/cases" for m in mutants], mutants)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(planted, name):
    mutant, case, words = MISTAKES[name]
    (program,) = [path for path in planted if path.parent.name == name]
    said = ""
    for seed in ("1", "2", "3"):
        done = run(program, case, "random", seed, "3", limit_s=120)
        said = done.stdout
        if done.returncode != 0 and re.search(words, said):
            return
    pytest.fail(f"not found by {mutant.kind} in {case}:\n{said[-3000:]}")


# ---- bytes and launches --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "decay", "most"), [("float32", 0.0, 21), ("float32", 0.1, 25), ("float16", 0.0, 19)]
)
def test_bytes_and_launches_of_a_step(dtype, decay, most):
    """Steady residuals, 0.1 %: the pass over the tensors and nothing else that counts."""
    emulated = programs.emulated()
    emulated.set_order("forward", 1, 4)
    rng = np.random.default_rng(3)
    count, k = 400_000, 400
    u, v = np.zeros(count, np.float32), np.zeros(count, np.float32)
    weight = rng.standard_normal(count).astype(dtype)
    with devices.replaced("cpu", emulated.kernels):
        workspace = kernels.dgc_workspace(u, v, k)
        for _ in range(16):
            grad = rng.standard_normal(count).astype(dtype)
            emulated.take_traffic()
            kernels.dgc_step(
                grad, u, v, k, momentum=0.9, weight=weight, weight_decay=decay, workspace=workspace
            )
            loaded, stored, launches = emulated.take_traffic()
    print(f"{dtype}, decay {decay}: {(loaded + stored) / count:.2f} B an element", launches)
    assert (loaded + stored) / count <= most
    assert launches <= 4


def test_many_tensors_take_the_same_launches():
    emulated = programs.emulated()
    rng = np.random.default_rng(4)
    sizes = rng.integers(1, 3000, 161).tolist()
    grads, us, vs = ([rng.standard_normal(n).astype(np.float32) for n in sizes] for _ in range(3))
    emulated.take_traffic()
    with devices.replaced("cpu", emulated.kernels):
        kernels.dgc_step(grads, us, vs, [1 + n // 100 for n in sizes], momentum=0.9)
    assert emulated.take_traffic()[2] <= 4
