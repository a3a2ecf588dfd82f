"""The memory orders of code without locks, over a model of a weak memory.

weak_memory.h describes the model. mutations.txt weakens the orders one by one;
test_mutations.py runs its rows.
"""

import pytest
from finished import finished

from build import CSRC, build

pytestmark = pytest.mark.no_attack("the suite runs without ranks")
RUN_LIMIT_S = 300  # takes some 10 s

# What the suite models in its own words, because other processes read plain memory there.
QUOTED = {
    "observe/flight_recorder.cpp": """\
  StdAtomics::release_fence();
  slot(head_.begun) = record;
  __atomic_store_n(&head_.begun, head_.begun + 1, __ATOMIC_RELEASE);
""",
}


@pytest.mark.timeout(600)
def test_no_execution_has_a_fault() -> None:
    (binary,) = build("product", ["weak_memory"])
    done = finished([str(binary)], timeout=RUN_LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed" in done.stdout


@pytest.mark.parametrize("file", QUOTED)
def test_modelled_text_is_the_source(file: str) -> None:
    assert (CSRC / file).read_text().count(QUOTED[file]) == 1
