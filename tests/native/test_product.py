"""Fast native suites, linked with the objects of the module that users load.

tests/native/test_native.py runs all suites under the sanitizers.
"""

import pytest
from finished import finished

from build import BuildFailed, build

# Plans takes 10 s: it proves each plan of each number of ranks.
QUICK = ["choose", "frames", "handshake", "compact", "levels", "link", "mutants", "plans", "stages"]
RUN_LIMIT_S = 200


@pytest.mark.parametrize("suite", QUICK)
def test_suite_against_the_product(suite: str) -> None:
    try:
        (binary,) = build("product", [suite])
    except BuildFailed as error:  # the compiler's text, without a traceback
        pytest.fail(str(error), pytrace=False)
    done = finished([str(binary)], timeout=RUN_LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed" in done.stdout
