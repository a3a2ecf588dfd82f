"""Compiles the core for aarch64 and runs its suites under qemu, also with pages of 64 KiB.

qemu emulates a stricter memory order than an Arm processor has: test_weak_memory.py checks the
orders. tools/aarch64.py runs the Python package. No Arm machine has run either.
"""

import shutil
import subprocess

import pytest

from build import CROSS_COMPILER, BuildFailed, build

EMULATOR = "qemu-aarch64"
SMALL_PAGES, LARGE_PAGES = 4 << 10, 64 << 10  # Linux for aarch64 has either
# A suite, a part of the names of its tests, and the size of a page. Left out: encryption needs
# OpenSSL for aarch64, and qemu ignores MADV_REMOVE, by which a heap returns memory.
CASES = [
    *((suite, "", SMALL_PAGES) for suite in ("kernels", "halves", "compact", "plans", "link")),
    ("shared", "", SMALL_PAGES),
    ("transport", "shm: ", SMALL_PAGES),
    ("shared", "", LARGE_PAGES),
    ("transport", "shm: ", LARGE_PAGES),
    ("transport", "local: ", LARGE_PAGES),
    ("zero_copy", "arrays", LARGE_PAGES),
    ("zero_copy", "a heap as seen", LARGE_PAGES),
]

pytestmark = [
    pytest.mark.no_attack("the suites run without ranks"),
    pytest.mark.skipif(
        not (shutil.which(CROSS_COMPILER) and shutil.which(EMULATOR)),
        reason="needs g++-aarch64-linux-gnu and qemu-user",
    ),
    pytest.mark.timeout(1200),  # the first suite compiles the whole core
]


@pytest.mark.parametrize(("suite", "part", "page_bytes"), CASES)
def test_suite_passes_on_aarch64(suite: str, part: str, page_bytes: int) -> None:
    try:
        (binary,) = build("aarch64", [suite])
    except BuildFailed as error:  # the compiler's text, without a traceback
        pytest.fail(str(error), pytrace=False)
    done = subprocess.run(
        [EMULATOR, "-p", str(page_bytes), str(binary), part],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert ", 0 failed" in done.stdout
    assert not done.stdout.startswith("0 passed")
