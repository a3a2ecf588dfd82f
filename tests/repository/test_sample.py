"""What a tier runs: rows of the day (support/sample.py), and programs that are built before."""

import pytest
from sample import of_the_day, title

from build import BUILT, BuildFailed, is_built


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_consecutive_days_have_every_row_once(monkeypatch, parts):
    rows, found = list(range(11)), []
    for day in range(20_786, 20_786 + parts):
        monkeypatch.setenv("SAMPLE", str(day))
        assert str(day) in title()
        found += of_the_day(rows, parts)
    assert sorted(found) == rows


def test_without_a_day_all_rows_run(monkeypatch):
    monkeypatch.delenv("SAMPLE", raising=False)
    assert of_the_day("abc", 3) == ["a", "b", "c"]


def test_a_program_that_was_not_built_is_named(monkeypatch, tmp_path):
    (tmp_path / "there").touch()
    monkeypatch.setenv(BUILT, "1")
    assert is_built(tmp_path, ["there"])
    with pytest.raises(BuildFailed, match="absent"):
        is_built(tmp_path, ["there", "absent"])
    monkeypatch.delenv(BUILT)
    assert not is_built(tmp_path, ["absent"])
