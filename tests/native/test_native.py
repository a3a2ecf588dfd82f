"""Runs every native suite under the address and undefined sanitizers, and those with threads under
the thread sanitizer on every other day, without SAMPLE under both.

The suites are C++ (tests/native/*_test.cpp); tests/native/build.py builds them. A report of a
sanitizer fails the suite: there are no suppressions.
"""

import os
import subprocess

import pytest
from finished import finished
from sample import of_the_day
from sanitizers import OPTIONS, fixed_addresses

from build import BuildFailed, build, suites

pytestmark = [
    pytest.mark.no_attack("suites count their descriptors, and join ranks without a handshake"),
    pytest.mark.timeout(1200),  # without --built the first test of a sanitizer compiles csrc
]

RUN_LIMIT_S = 600  # of one suite, which takes 5 to 170 s on an idle machine
# They use fibers, which the thread sanitizer does not support, and for whose stacks the address
# sanitizer's copies of frames take minutes. Most of their time is simulation.
SIMULATION = "simulation"
# Copies of frames of all fibers need 21 GB.
FIBERS = {"ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=0"}
WEAK_MEMORY = "weak_memory"  # so does this one, which tests orders: test_weak_memory.py
SPARSE = "sparse"  # starts threads
FRAMES = "frames"  # counts functions on the stack of the product: test_product.py
SHORT = "of three, in every order"  # of its tests; `make simulate` runs all of them
PARTS = ["of one rank of three, in", "messages between devices", "every disagreement"]  # of SHORT
# They start no thread, so they have no data race for the thread sanitizer to find.
SINGLE_THREADED = ["choose", "compact", "encrypted", "halves", "handshake", "kernels", "levels"]
SINGLE_THREADED += ["link", "mutants", "online_tuner", "plans", "stages"]
THREAD_STARTS = ("_M_start_thread", "pthread_create", "thrd_create")  # parts of symbols

THREADED = sorted({*suites()} - {SIMULATION, WEAK_MEMORY, FRAMES, *SINGLE_THREADED})
BOTH = [(kind, name) for i, name in enumerate(THREADED) for kind in ("asan", "tsan")[:: (-1) ** i]]
RUNS = [("asan", name) for name in SINGLE_THREADED] + of_the_day(BOTH, 2)


@pytest.mark.parametrize(("sanitizer", "suite"), RUNS)
def test_native(sanitizer: str, suite: str) -> None:
    run(sanitizer, suite)


@pytest.mark.parametrize("suite", SINGLE_THREADED)
def test_suite_without_threads_cannot_start_one(suite: str) -> None:
    assert not starts_threads(suite), "remove it from SINGLE_THREADED"


def test_suite_with_threads_is_recognized() -> None:
    assert starts_threads(SPARSE)


def starts_threads(suite: str) -> bool:
    """Whether the suite, with all of csrc that it links, calls a function that starts a thread."""
    (binary,) = build("product", [suite])  # without the run time of a sanitizer
    done = finished(["nm", "-u", str(binary)], check=True)
    assert "__cxa_throw" in done.stdout
    return any(name in done.stdout for name in THREAD_STARTS)


def test_every_order_of_events() -> None:
    """The address sanitizer, which takes twelve times as long, sees a third of them each day."""
    assert "4 passed" in run("product", SIMULATION, SHORT)
    for part in of_the_day(PARTS, len(PARTS)):
        run("asan", SIMULATION, part)


def run(sanitizer: str, suite: str, *tests: str) -> str:
    """The output of a suite, or of those of its tests whose names contain `part`; it must pass."""
    try:
        (binary,) = build(sanitizer, [suite])
    except BuildFailed as error:  # the compiler's text, without a traceback
        pytest.fail(str(error), pytrace=False)
    try:
        done = finished(
            [*fixed_addresses(), str(binary), *tests],
            errors="replace",
            timeout=RUN_LIMIT_S,
            env={**os.environ, **OPTIONS, **(FIBERS if suite == SIMULATION else {})},
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        pytest.fail(f"{suite} was not done after {RUN_LIMIT_S} s\n{output}", pytrace=False)
    output = done.stdout + done.stderr
    if done.returncode != 0:
        pytest.fail(f"{suite} ended with {done.returncode}\n{output}", pytrace=False)
    assert ", 0 failed" in output
    return output
