"""Memory and seconds of DataLoader(shared=True) (benchmarks/training/shared_data.py)."""

from pathlib import Path

import pytest

from benchmarks.training import shared_data
from pycomm.bench.support import summaries


def test_one_copy_needs_less_memory_than_caches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "shared_data.json"
    arguments = ["--count", "200", "--epochs", "6", "--json", str(path)]
    assert shared_data.main(arguments) == 0
    rows = {row["way"]: row for row in summaries.read(path)["rows"]}
    assert list(rows) == list(shared_data.WAYS)
    assert all(len(row["seconds"]) == 7 for row in rows.values())
    data = 200 * shared_data.BYTES / 2**20  # of which each cache has nearly all after six epochs
    assert rows["shared"]["mib"] < rows["cache"]["mib"] - data / 2
    assert "29 MiB decoded" in capsys.readouterr().out
