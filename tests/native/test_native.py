"""Runs every native suite under the address and undefined, and under the thread sanitizer.

The suites are C++ (tests/native/*_test.cpp); tests/native/build.py builds them. A report of a
sanitizer fails the suite: there are no suppressions.
"""

import os
import subprocess

import pytest
from sanitizers import OPTIONS, fixed_addresses

from build import BuildFailed, build, suites

pytestmark = pytest.mark.no_attack(
    "suites count their descriptors, and join ranks without a handshake"
)

RUN_LIMIT_S = 600  # of one suite, which takes 5 to 170 s on an idle machine
# They use fibers, which the thread sanitizer does not support, and for whose stacks the address
# sanitizer's copies of frames take minutes. Most of their time is simulation.
SIMULATION = "simulation"
SHORT = "of three, in every order"  # of its tests; `make simulate` runs all of them


# The first test of a sanitizer compiles all of csrc.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("suite", [name for name in suites() if name != SIMULATION])
@pytest.mark.parametrize("sanitizer", ["asan", "tsan"])
def test_native(sanitizer: str, suite: str) -> None:
    run(sanitizer, suite)


@pytest.mark.timeout(1200)
def test_every_order_of_events() -> None:
    assert "4 passed" in run("asan", SIMULATION, SHORT)


def run(sanitizer: str, suite: str, *tests: str) -> str:
    """The output of a suite, or of those of its tests whose names contain `part`; it must pass."""
    try:
        (binary,) = build(sanitizer, [suite])
    except BuildFailed as error:  # the compiler's text, without a traceback
        pytest.fail(str(error), pytrace=False)
    try:
        done = subprocess.run(
            [*fixed_addresses(), str(binary), *tests],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=RUN_LIMIT_S,
            env={**os.environ, **OPTIONS, **({"ASAN_OPTIONS": ""} if suite == SIMULATION else {})},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        pytest.fail(f"{suite} was not done after {RUN_LIMIT_S} s\n{output}", pytrace=False)
    if done.returncode != 0:
        pytest.fail(f"{suite} ended with {done.returncode}\n{done.stdout}", pytrace=False)
    assert ", 0 failed" in done.stdout
    return done.stdout
