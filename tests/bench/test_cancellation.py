"""Ctrl-C in every wait of a rank (benchmarks/reliability/cancellation.py).

tests/native/patience_test.cpp tests the waits for a busy peer.
"""

from pathlib import Path

import pytest

from benchmarks.reliability import cancellation
from benchmarks.reliability.cancellation import WAITS, took_ms
from pycomm.bench.support import summaries

LIMIT_MS = 1000.0  # the promised limit is 200, on a machine with less load than that of the tests


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_every_wait(wait: str) -> None:
    assert took_ms(wait) < LIMIT_MS


def test_the_command_measures_and_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    took = iter([1.0, 250.0, 3.0, 4.0])
    monkeypatch.setattr(cancellation, "WAITS", dict.fromkeys(["here", "there"]))
    monkeypatch.setattr(cancellation, "took_ms", lambda name: next(took))
    path = tmp_path / "cancellation.json"
    assert cancellation.main(["--rounds", "2", "--json", str(path)]) == 1  # one took too long
    rows = summaries.read(path)["rows"]
    assert rows[0] == {"wait": "here", "median_ms": 125.5, "worst_ms": 250.0, "rounds": 2}
    assert "125.5" in capsys.readouterr().out
