"""The format of stored results, and the size of what is stored."""

from pathlib import Path

import pytest
from paths import ROOT

from pycomm.bench.support import summaries

RESULTS = ROOT / "benchmarks" / "results"
LIMIT = 392_000  # bytes of all JSON files


def test_samples_become_median_worst_and_count() -> None:
    assert summaries.summarize([3.0, 9.0, 4.0]) == {"median": 4.0, "worst": 9.0, "count": 3}
    assert summaries.summarize([]) == {"median": None, "worst": None, "count": 0}


def test_curve_has_means_of_equal_parts() -> None:
    assert summaries.curve(range(40)) == [2 * i + 0.5 for i in range(20)]
    assert summaries.ends(40)[-2:] == [38, 40]
    assert summaries.curve([1.0, 2.0]) == [1.0, 2.0]
    assert summaries.curve([]) == []


def test_content_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "out.json"
    content = {"settings": {"ranks": 2}, "rows": [{"a": 1, "b": None}, {"a": 0.25, "b": "x"}]}
    summaries.write(path, content | {"empty": []})
    assert summaries.read(path) == content | {"empty": []}
    assert path.read_text().count("\n") == 8  # one row a line
    summaries.write(path, {"rows": [{"a": 0.1234567891234, "b": [0.123456789]}]})
    assert summaries.read(path)["rows"] == [{"a": 0.123456789, "b": [0.12346]}]
    with pytest.raises(ValueError, match="rows with different fields"):
        summaries.write(path, {"rows": [{"a": 1}, {"b": 1}]})


def test_stored_results_are_small_and_in_this_format(tmp_path: Path) -> None:
    assert sum(path.stat().st_size for path in RESULTS.rglob("*.json")) < LIMIT
    for path in sorted(RESULTS.glob("*.json")):
        summaries.write(tmp_path / path.name, summaries.read(path))
        assert (tmp_path / path.name).read_text() == path.read_text(), path.name


def test_a_csv_file_has_the_rows(tmp_path: Path) -> None:
    rows = [{"peer": "gloo", "time_us": 0.1234567891234}, {"peer": "a,b", "time_us": None}]
    summaries.write(tmp_path / "out.csv", {"machine": {}, "rows": rows})
    text = (tmp_path / "out.csv").read_text()
    assert text.splitlines() == ["peer,time_us", "gloo,0.123456789", '"a,b",']
