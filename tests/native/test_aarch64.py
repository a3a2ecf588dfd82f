"""Compiles the core for aarch64, and runs its suites of plans, kernels and codecs under qemu.

qemu emulates a stricter memory order than an Arm processor has. The test shows that the code
compiles and that its numbers are correct. No Arm machine has run it.
"""

import shutil
import subprocess

import pytest

from build import CROSS_COMPILER, BuildFailed, build

EMULATOR = "qemu-aarch64"
SUITES = ["kernels", "halves", "compact", "plans", "link"]

pytestmark = [
    pytest.mark.no_attack("the suites run without ranks"),
    pytest.mark.skipif(
        not (shutil.which(CROSS_COMPILER) and shutil.which(EMULATOR)),
        reason="needs g++-aarch64-linux-gnu and qemu-user",
    ),
    pytest.mark.timeout(1200),  # the first suite compiles the whole core
]


@pytest.mark.parametrize("suite", SUITES)
def test_suite_passes_on_aarch64(suite: str) -> None:
    try:
        (binary,) = build("aarch64", [suite])
    except BuildFailed as error:  # the compiler's text, without a traceback
        pytest.fail(str(error), pytrace=False)
    done = subprocess.run(
        [EMULATOR, str(binary)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert ", 0 failed" in done.stdout
