"""The convergence benchmark: its runs, its results, and equality of threads and processes."""

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training import convergence, workloads
from benchmarks.training.convergence import Run
from benchmarks.training.workloads import WORKLOADS
from pycomm.bench.support import summaries
from pycomm.testing import run_ranks
from tools import tables

ADDED = ("samples_per_s", "link_mbit")  # to the rows, since the first version
METHODS = ["dense", "dgc", "top-k without feedback", "local 2", "local adaptive"]


def run(path: Path, methods: list[str], *more: str) -> list[dict[str, Any]]:
    arguments = ["--ranks", "2", "--steps", "4", "--workloads", "text", "--seeds", "1"]
    arguments += ["--methods", ",".join(methods), "--json", str(path), *more]
    assert convergence.main(arguments) == 0
    rows: list[dict[str, Any]] = summaries.read(path)["rows"]
    return rows


def test_runs_are_stored_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    first = run(path, METHODS[:2])
    rows = run(path, METHODS, "--plot", str(tmp_path / "out.png"))
    assert rows[:2] == first  # not trained a second time
    assert [row["method"] for row in rows] == METHODS
    assert all(row["replicas_equal"] and 0 < row["score"] < 6 for row in rows)
    dense, dgc, _, local, _ = rows
    for row in rows:  # of 8 texts per rank and step
        assert row["samples_per_s"] == pytest.approx(2 * 4 * 8 / row["seconds"], rel=1e-6)
    assert dense["sent_mb"] == dense["dense_mb"]
    assert dgc["sent_mb"] < dense["sent_mb"] / 2
    assert local["sent_mb"] == dense["sent_mb"] * 2 / 4  # after steps 1 and 3
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "top-k without feedback" in capsys.readouterr().out


def test_link_limits_the_rate(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    free = run(path, ["dense"])
    rows = run(path, ["dense", "local 1"], "--link-mbit", "10")
    assert [row["link_mbit"] for row in rows] == [None, 10, 10]  # the first is another case
    for row in rows[1:]:
        assert row["seconds"] > 8 * row["sent_mb"] * 2**20 / 10e6 / 2  # half: bursts are free
        assert row["sent_mb"] == row["dense_mb"]
    assert rows[1]["score"] == free[0]["score"]


def test_rows_of_older_versions_are_read(tmp_path: Path) -> None:
    """Without a rate, for which the table has no column if no row has one."""
    path = tmp_path / "out.json"
    rows = run(path, ["dense"])
    with_rate = tables.convergence({"rows": rows}, {})
    assert "per second" in with_rate[0]
    assert f" {tables.number(rows[0]['samples_per_s'])} |" in with_rate[2]
    older = [{k: v for k, v in row.items() if k not in ADDED} for row in rows]
    assert "per second" not in "\n".join(tables.convergence({"rows": older}, {}))
    summaries.write(path, {"rows": older})
    assert run(path, ["dense", "local 1"])[0] == {**older[0], **dict.fromkeys(ADDED)}


def test_threads_train_as_processes_do() -> None:
    """20 steps of DGC, bit for bit."""
    results = []
    for processes in (False, True):
        models = [WORKLOADS["text"].model(0) for _ in range(2)]
        per_rank = run_ranks(
            2,
            convergence.rank_runs,
            *(("text", "dgc"), 0, 20, models),
            transport="" if processes else "local",
            processes=processes,
            timeout_s=200,
        )
        results += [parameters for _, _, parameters in per_rank]
    assert all(torch.equal(result, results[0]) for result in results)


def _write_images(folder: Path, part: str, count: int) -> None:
    """Files in Fashion-MNIST's format; the brightness of an image encodes its label."""
    labels = torch.arange(count, dtype=torch.uint8) % 10
    pixels = (labels * 25)[:, None].expand(count, 784).contiguous()
    for name, header, content in (("images-idx3", 16, pixels), ("labels-idx1", 8, labels)):
        packed = gzip.compress(bytes(header) + content.numpy().tobytes())
        (folder / f"{part}-{name}-ubyte.gz").write_bytes(packed)


def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "t10k"):
        _write_images(tmp_path, part, 200)
    monkeypatch.setattr(workloads, "IMAGES", tmp_path)
    monkeypatch.setattr(workloads, "_images", workloads._images.__wrapped__)
    x, y = WORKLOADS["images"].batch(8, torch.Generator().manual_seed(0))
    assert x.shape == (8, 1, 28, 28)
    assert torch.equal(x[:, 0, 5, 7], (y * 25 / 255 - 0.286) / 0.353)
    untrained = WORKLOADS["images"].score(WORKLOADS["images"].model(0))
    run = convergence.train(WORKLOADS["images"], convergence.METHODS["dgc"], 0, 2, 100)
    assert untrained <= 20 < run.score <= 100
    assert run.replicas_equal


def _runs(scores: dict[str, list[float]]) -> list[Run]:
    steps = WORKLOADS["text"].steps
    rest: dict[str, Any] = {
        "ranks": 8,
        "steps": steps,
        "dense_mb": 100.0,
        "sent_mb": 6.0,
        "seconds": 1.0,
    }
    curve: dict[str, Any] = {
        "replicas_equal": True,
        "losses": [4.0, 2.0, 2.0, 2.0],
        "mb": [4.0, 5.0, 5.5, 6.0],
    }
    return [
        Run(workload="text", method=method, seed=seed, score=score, **rest, **curve)
        for method, of_seeds in scores.items()
        for seed, score in enumerate(of_seeds)
    ]


def test_scores_are_checked_against_bands_and_order() -> None:
    good = {"dense": [1.71, 1.72], "dgc": [1.88, 1.89], "dgc without masking": [1.91, 1.92]}
    lines, fits = convergence.summary(_runs(good))
    assert fits
    assert [line.split()[-4:] for line in lines[2:]] == [["in", "16.7x", "50.0x", "equal"]] * 2
    for wrong, message in (
        ({"dgc": [2.0, 2.01]}, " worse "),
        ({"dgc": [1.6, 1.61]}, "'dgc' ranked before 'dense'"),
        ({"dgc": [1.91, 1.92], "dgc without masking": [1.85, 1.86]}, " before 'dgc'"),
        ({"dense": [1.6, 1.61]}, " worse "),
    ):
        lines, fits = convergence.summary(_runs(good | wrong))
        assert not fits
        assert message in "\n".join(lines)
    lines, fits = convergence.summary(_runs(good | {"dense": [1.8, 1.81]}))
    assert fits
    assert " better " in lines[2]
    lines, fits = convergence.summary([replace(_runs(good)[0], replicas_equal=False)])
    assert not fits
    assert "DIFFER" in lines[1]
    short = [replace(run, steps=4, score=9.0) for run in _runs(good)]
    assert convergence.summary(short)[1]  # bands are of complete runs
    accuracy = [replace(run, workload="images", steps=2000) for run in _runs({"dense": [88.0]})]
    accuracy += [replace(accuracy[0], method="dgc", score=87.3)]
    assert " 0.700 " in convergence.summary(accuracy)[0][2]
