"""Which files a tier imports (tests/support/tiers.py), and the order of its tests (order.py)."""

import re

import pytest
from order import LONGEST, longest_first
from paths import ROOT
from tiers import may_have, tier_of

LONG = [f"tests/folder/{name}" for name in LONGEST]
SHORT = [f"tests/folder/test_short.py::test[{i}]" for i in range(40)]
NAMES = [*SHORT[:25], *LONG[::-1], *SHORT[25:]]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 9])
def test_every_share_begins_with_long_tests(workers):
    order = longest_first(NAMES, workers)
    assert sorted(order) == list(range(len(NAMES)))
    begin = 0
    for worker in range(workers):
        size = (len(NAMES) - begin) // (workers - worker)  # as xdist's worksteal divides them
        share = [NAMES[i] for i in order[begin : begin + size]]
        expected = LONG[worker::workers]
        assert share[: len(expected)] == expected
        assert not set(share[len(expected) :]) & set(LONG)
        begin += size
    assert [i for i in order if NAMES[i] in SHORT] == [i for i, n in enumerate(NAMES) if n in SHORT]


@pytest.mark.parametrize("names", [[], LONG[:1], LONG, SHORT[:2]], ids=len)
def test_more_workers_than_tests(names):
    assert sorted(longest_first(names, 5)) == list(range(len(names)))


@pytest.mark.parametrize("name", LONGEST)
def test_the_long_tests_exist(name):
    file, test = name.split("::")
    (path,) = (ROOT / "tests").glob(f"*/{file}")
    function, parameter = test.rstrip("]").partition("[")[::2]
    assert f"def {function}(" in path.read_text()
    sources = "".join(p.read_text() for p in path.parent.glob("*.py"))
    sources += "".join(p.name for p in path.parent.glob("*_test.cpp"))  # native suites
    assert all(part in sources for part in parameter.split("-"))


def test_a_tier_imports_each_file_that_has_its_tests():
    ignored = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        names = re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
        tiers = {tier_of(path, name) for name in names}
        assert all(may_have(path, tier) for tier in tiers), path.name
        assert all(may_have(path, other) for other in ("", "not unit", "gpu or unit")), path.name
        ignored |= {tier for tier in ("unit", "quick", "full") if not may_have(path, tier)}
    assert ignored == {"unit", "quick", "full"}
