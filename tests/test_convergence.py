"""The convergence benchmark: its runs, what it stores, and that threads stand for processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import convergence
from benchmarks.workloads import WORKLOADS
from pycomm.testing import run_ranks

METHODS = ["dense", "dgc", "top-k without feedback", "local 2", "local adaptive"]


def run(path: Path, methods: list[str], *more: str) -> list[dict[str, Any]]:
    words = ["--ranks", "2", "--steps", "4", "--workloads", "text", "--seeds", "1"]
    words += ["--methods", ",".join(methods), "--json", str(path), *more]
    assert convergence.main(words) == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_runs_are_stored_and_taken_up_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    first = run(path, METHODS[:2])
    rows = run(path, METHODS, "--plot", str(tmp_path / "out.png"))
    assert rows[:2] == first  # not trained a second time
    assert [row["method"] for row in rows] == METHODS
    assert all(row["replicas_equal"] and 0 < row["score"] < 6 for row in rows)
    dense, dgc, _, local, _ = rows
    assert dense["sent_mb"] == dense["dense_mb"]
    assert dgc["sent_mb"] < dense["sent_mb"] / 2
    assert local["sent_mb"] == dense["sent_mb"] * 2 / 4  # after steps 1 and 3
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "top-k without feedback" in capsys.readouterr().out


def test_threads_train_as_processes_do() -> None:
    """20 steps of DGC, bit for bit."""
    results = []
    for processes in (False, True):
        models = [WORKLOADS["text"].model(0) for _ in range(2)]
        told = run_ranks(
            2,
            convergence.rank_runs,
            *(("text", "dgc"), 0, 20, models),
            transport="" if processes else "local",
            processes=processes,
            timeout_s=200,
        )
        results += [parameters for _, _, parameters in told]
    assert all(torch.equal(result, results[0]) for result in results)


def test_nonsense_is_refused() -> None:
    with pytest.raises(SystemExit):
        convergence.main(["--methods", "hope"])
