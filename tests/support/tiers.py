"""The tier of each test. Its folder decides, except for the files and tests that are listed here.

    make test-unit   unit: no ranks beyond one process, below a minute
    make test        unit and quick: for users, three minutes on two cores
    make test-full   full: all others
    make test-all    both
    make nightly     nightly: what is compiled once more for it; PART=tests, beside other parts

conftest.py gives each test the marker of its tier, so that no test needs a decorator.
"""

import re
from pathlib import Path

WORDS = {"unit", "quick", "full", "nightly", "or"}  # of an expression for may_have()
# Tests in other folders of tests/ are "full": `make test-full` runs them.
FOLDERS = {"unit": "unit", "ranks": "quick"}
FILES = {
    # Too long for the tier of their folder.
    "test_combinations": "full",
    "test_large": "full",
    "test_shared_arrays": "full",
    # Short, and the first to fail after a change of the layers, of the core or of torch's backend.
    "test_c10d": "quick",
    "test_classes": "quick",
    "test_handlers": "quick",
    "test_layers": "quick",
    "test_product": "quick",
    # Compiled once more: csrc, or its kernels. test_classes.py holds the second property always.
    "test_aarch64": "nightly",
    "test_one_definition": "nightly",
    "test_coverage": "nightly",
    # Needs Debian's Slurm.
    "test_slurm": "nightly",
    # Small runs of benchmarks that developers start; eight minutes of processor time.
    "test_bench_training": "nightly",
    "test_bench_reliability": "nightly",
}
# Tests that take too long for the tier of their file, which are "full".
SLOW = {
    "test_layers": ["test_every_header_compiles_alone"],
    "test_malformed_calls": ["test_malformed_states"],
    "test_membership": [
        *("test_every_order_after_deaths", "test_every_order_after_the_first_rank_stopped"),
    ],
    "test_update_options": ["test_convergence_is_near_that_of_dense_adamw"],
}


# Tests of other files that are "nightly".
NIGHTLY = {"test_programs": ["test_runs_with_pycomm_in_place_of_gloo"]}


def may_have(path: Path, expression: str) -> bool:
    """Whether the file may have tests that `pytest -m expression` selects. Each worker of a run
    imports its files, and pytest rewrites their assertions: seconds for all files."""
    words = set(re.findall(r"\w+", expression))
    names = ["", *SLOW.get(path.stem, []), *NIGHTLY.get(path.stem, [])]
    tiers = {tier_of(path, name) for name in names}
    understood = bool(words) and words <= WORDS
    return not understood or bool(words & tiers)


def tier_of(path: Path, name: str) -> str:
    """The marker of the test `name`, without its parameters, in the file `path`."""
    if name in SLOW.get(path.stem, []):
        return "full"
    if name in NIGHTLY.get(path.stem, []):
        return "nightly"
    return FILES.get(path.stem, FOLDERS.get(path.parent.name, "full"))
