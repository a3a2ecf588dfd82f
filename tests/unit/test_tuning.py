"""Thresholds measured on the machine: stored values, invalid files, and agreement of all ranks."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from core_groups import connect

import pycomm
from pycomm import _core
from pycomm.__main__ import main
from pycomm._bootstrap import thresholds
from pycomm.group import Group
from pycomm.tuning import tune

SMALL, MIDDLE = 1 << 18, 1 << 22


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither reads nor writes the user's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_saved_thresholds_are_loaded(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert thresholds.thresholds() == []
    file = thresholds.save([("tcp", SMALL, MIDDLE)])
    assert file == thresholds.path()
    assert cache in file.parents
    thresholds.save([("shm", 1, 2)])
    assert sorted(thresholds.thresholds()) == [("shm", 1, 2), ("tcp", SMALL, MIDDLE)]
    assert caplog.text == ""
    assert [p.name for p in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 0}, "has format 0"),
        ({"machine": "another"}, "is of another machine"),
        ({"thresholds": {"tcp": {"small_bytes": -1, "middle_bytes": 2}}}, "is damaged"),
        ({"thresholds": {"tcp": {"small_bytes": "1", "middle_bytes": 2}}}, "is damaged"),
        ({"thresholds": {"pigeon": {"small_bytes": 1, "middle_bytes": 2}}}, "is damaged"),
        ({"thresholds": {"tcp": {"small_bytes": 1}}}, "is damaged"),
        ({"thresholds": 7}, "is damaged"),
    ],
)
def test_file_of_another_machine_is_reported(
    change: dict[str, object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = thresholds.save([("tcp", SMALL, MIDDLE)])
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert thresholds.thresholds() == []
    assert why in caplog.text
    assert "using the built-in thresholds" in caplog.text


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[]", b"3"])
def test_invalid_file_is_reported(text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    thresholds.save([]).write_bytes(text)
    assert thresholds.thresholds() == []
    assert "using the built-in thresholds" in caplog.text


def sent_by_tcp(tuned_by_rank: list[list[tuple[str, int, int]]], count: int) -> list[int]:
    """Bytes that each rank sends in an all_reduce of float32 [count], and in one of a subgroup."""
    store = _core.LocalStore()
    size = len(tuned_by_rank)

    def rank(i: int) -> int:
        options = {"timeout_s": 30.0, "secret": "x" * 32, "transport": "tcp"}
        core = connect(store, i, size, **options, tuned=tuned_by_rank[i])
        part = Group(core, store).split(0)
        assert part is not None
        x = np.full(count, i, np.float32)
        before = part.stats().bytes_sent
        pycomm.all_reduce(x, group=part)
        assert x[-1] == sum(range(size))
        return part.stats().bytes_sent - before

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def test_all_ranks_use_the_thresholds_of_rank_0() -> None:
    count = SMALL // 4
    by_ring = sent_by_tcp([[], [("tcp", SMALL, MIDDLE)], []], count)
    assert sum(by_ring) == pytest.approx(3 * 4 / 3 * SMALL, rel=0.01)
    for known in ([("shm", 1, 1), ("tcp", SMALL, MIDDLE)], [("tcp", SMALL, 1)]):
        direct = sent_by_tcp([known, [], [("tcp", 0, 0)]], count)
        assert direct == [2 * SMALL] * 3
        above = sent_by_tcp([known, [], []], count + 3)
        assert sum(above) < sum(direct)
    other = sent_by_tcp([[("shm", SMALL, MIDDLE)], [], []], count)
    assert other == by_ring


@pytest.mark.parametrize(
    ("first", "second", "turns_at"),
    [
        ([1, 1, 1, 1], [2, 2, 0.5, 0.5], 2),
        ([1, 1, 1, 1], [2, 0.9, 2, 0.5], 4),  # noise in one size does not change the choice
        ([1, 1, 1, 1], [0.5, 0.5, 0.5, 0.5], 0),
        ([1, 1, 1, 1], [2, 2, 2, 2], 8),
    ],
)
def test_threshold_minimizes_the_loss(
    first: list[float], second: list[float], turns_at: int
) -> None:
    pairs = list(zip(first, second, strict=True))
    assert tune.threshold([1, 2, 4, 8], pairs) == turns_at


def test_command_measures_and_stores_thresholds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 0
    [(by, small, middle)] = thresholds.thresholds()
    assert (by, middle) == ("tcp", thresholds.BUILT_IN[1])  # 4 ranks cannot measure it
    assert small in (0, *tune.SIZES)
    output = capsys.readouterr().out
    assert f"small_bytes {small}" in output
    assert str(thresholds.path()) in output


def test_rank_0_shows_progress_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(tune.progress([1, 2], 0)) == [1, 2]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert list(tune.progress([1, 2], 1)) == [1, 2]
    assert capsys.readouterr().out == ""
    assert list(tune.progress([1, 2], 0)) == [1, 2]
    shown = capsys.readouterr().out
    assert [f"{percent}%" in shown for percent in (0, 50, 100)] == [True] * 3


def test_one_rank_has_nothing_to_tune() -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--ranks", "1"])
