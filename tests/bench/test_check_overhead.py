"""The cost of the checks (benchmarks/reliability/check_overhead.py): both programs work.

No speed is tested.
"""

import subprocess

import pytest

from benchmarks.reliability import check_overhead
from benchmarks.reliability.check_overhead import Case
from pycomm.bench.support import summaries


def test_both_programs_make_their_calls(tmp_path, monkeypatch):
    cases = [Case("shm", 4, 10), Case("tcp", 4096, 10)]  # without a limit
    monkeypatch.setattr(check_overhead, "CASES", cases)
    path = tmp_path / "check_overhead.json"
    assert check_overhead.main(["--rounds", "2", "--json", str(path)]) == 0
    costs = summaries.read(path)["costs"]
    assert [(c["transport"], c["bytes"]) for c in costs] == [("shm", 4), ("tcp", 4096)]
    assert all(c["with_ns"] > 0 and c["without_ns"] > 0 for c in costs)


def test_a_check_that_is_not_found_is_an_error(monkeypatch):
    """Otherwise both programs would be equal, and the checks would seem to cost nothing."""
    path = "shared/shared_memory_region.cpp"
    monkeypatch.setitem(check_overhead.REMOVED, path, [("no such line", "")])
    with pytest.raises(ValueError, match=rf"{path} has 0 times, not once: no such"):
        check_overhead.without_checks(path)


@pytest.mark.parametrize(
    ("case", "cost", "kept"),
    [
        (Case("shm", 4, 1, most_ns=30.0), 29.0, True),
        (Case("shm", 4, 1, most_ns=30.0), 31.0, False),
        (Case("tcp", 4096, 1, most_percent=1.0), 9.0, True),
        (Case("tcp", 4096, 1, most_percent=1.0), 11.0, False),
    ],
)
def test_limit_of_the_case_decides_the_result(case, cost, kept, monkeypatch):
    outputs = {"with": f"{1000 + cost}\n2000\n", "without": "3000\n1000\n"}  # the best batch counts
    monkeypatch.setattr(subprocess, "check_output", lambda command, **_: outputs[command[0]])
    found = check_overhead.measure({name: name for name in outputs}, case, 3)
    assert [found[name] for name in ("with_ns", "without_ns", "cost_ns", "spread_ns", "kept")] == [
        1000 + cost,
        1000.0,
        cost,
        0.0,
        kept,
    ]
