"""A check that is removed or weakened fails the test that covers it.

The native suites run with the rows of mutations.txt: a quarter of them each day, all of them in
four days and without SAMPLE.
"""

from pathlib import Path

import mutations
import pytest
from finished import finished
from mutation_table import Mutation
from sample import of_the_day

from build import build

ROWS_OF_THE_DAY = of_the_day(mutations.ROWS, 4)

pytestmark = pytest.mark.no_attack(
    "a suite must fail for the mutation, not for unauthenticated clients"
)
LIMIT_S = 300  # of one test of a suite, which takes seconds


def run_mutant(program: Path, test: str) -> tuple[int, str]:
    """The exit status of a test of a suite, and its output."""
    done = finished([str(program), test], errors="replace", timeout=LIMIT_S)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(1200)  # without --built the first worker builds the suites
@pytest.mark.parametrize("row", ROWS_OF_THE_DAY, ids=lambda row: row.name)
def test_a_mutated_check_is_found(row: Mutation) -> None:
    status, found = run_mutant(mutations.mutated(row), row.test)
    assert status != 0, found
    assert "FAILED" in found or status < 0, found  # a signal, if the mutant crashes


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("suite", "test"), sorted({(row.key, row.test) for row in ROWS_OF_THE_DAY}), ids=lambda s: s
)
def test_a_sound_check_passes(suite: str, test: str) -> None:
    (program,) = build("product", [suite])
    status, found = run_mutant(program, test)
    assert status == 0, found
    assert " passed, 0 failed" in found
    assert not found.startswith("0 passed"), f"no such test: {test}"
