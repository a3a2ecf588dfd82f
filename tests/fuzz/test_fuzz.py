"""Every parser of untrusted bytes, fuzzed briefly (`make fuzz` does it for minutes).

The corpus is replayed first: inputs that once reached new code or caused failures. The address and
undefined-behaviour sanitizers are active. Parsers in Python: test_objects.py.
"""

from pathlib import Path

import pytest
from fuzzers import BuildFailed, build, targets
from hunt import CORPUS, fuzz

from build import clang

SECONDS = 2
LARGEST_CORPUS = 200 << 10  # total bytes


# The first test compiles the parts of csrc that the targets need.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", targets())
def test_arbitrary_bytes_are_a_value_or_an_error(target: str, tmp_path: Path) -> None:
    try:
        clang()
    except BuildFailed as error:  # no clang here
        pytest.skip(str(error))  # .ci/run installs it
    try:
        (binary,) = build([target])
    except BuildFailed as error:  # the compiler's text, without a traceback
        pytest.fail(str(error), pytrace=False)
    report = fuzz(target, binary, SECONDS, tmp_path)
    assert report.find == ""
    assert report.inputs > report.kept  # the corpus, and then new inputs


def test_each_target_has_a_small_corpus() -> None:
    assert set(targets()) == {p.name for p in CORPUS.iterdir()}
    files = [p for p in CORPUS.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < LARGEST_CORPUS
