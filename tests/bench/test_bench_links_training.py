"""The benchmark of steps between hosts and the count of bytes: a tiny run of each."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

import pycomm
from benchmarks.collectives import links
from benchmarks.training import received_bytes, steps
from pycomm.bench.kernels import residuals
from pycomm.bench.support import netns, summaries
from pycomm.bench.support.model import CharGPT, Shape
from pycomm.errors import InvalidArgument
from pycomm.testing import run_ranks


@pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())
def test_steps_between_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, drawn = tmp_path / "out.json", tmp_path / "out.png"
    arguments = [
        "--training",
        "--ways",
        "compute,overlap,dgc",
        "--steps",
        "1",
        "--compute-s",
        "0.05",
    ]
    arguments += ["--width", "128", "--json", str(stored), "--plot", str(drawn)]
    assert links.main([*arguments, "--rates", "10gbit"]) == 0
    assert drawn.stat().st_size > 0
    before = summaries.read(stored)["rows"]
    assert [row["way"] for row in before] == ["compute", "overlap", "dgc"]
    assert all(row["step_s"] > 0 for row in before)
    compute, overlap, dgc = before
    assert compute["expected_s"] is None
    assert overlap["expected_s"] is None
    assert dgc["expected_s"] > compute["step_s"]

    def nothing(*_: object) -> None:
        pytest.fail("stored results are measured again")

    monkeypatch.setattr(steps, "measure", nothing)
    assert links.main([*arguments, "--rates", "10gbit"]) == 0
    assert summaries.read(stored)["rows"] == before
    out = capsys.readouterr().out
    assert "1.467x" in out
    assert f"{dgc['expected_s']:.3f}" in out


def test_rate_limited_link_delays_data() -> None:
    """In each direction, in the group and in a subgroup. The benchmark checks the rate itself,
    which needs a free core at the right time."""
    speed, count = 10e6, 600_000

    def program(group: pycomm.Group) -> list[float]:
        part = group.split(0)
        found = []
        for one in (group, part):
            x = torch.zeros(count)
            pycomm.barrier(group=one)
            start = time.perf_counter()
            if group.rank == 0:
                pycomm.send(x, 1, group=one)
            else:
                pycomm.recv(x, 0, group=one)
            found.append(time.perf_counter() - start)
        return found

    burst = 0.02 * speed
    for seconds in run_ranks(2, program, transport="tcp", link_bytes_per_s=speed)[1]:
        assert seconds > (4 * count - 2 * burst) / speed
    with pytest.raises(InvalidArgument, match="invalid link_bytes_per_s: got 0"):
        run_ranks(2, program, link_bytes_per_s=0)


def test_steps_behind_token_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without root, and the output says so; a dense step waits for its bytes."""
    stored = tmp_path / "out.json"
    monkeypatch.setattr(steps, "missing", lambda: "needs root")
    arguments = [
        "--training",
        "--ways",
        "compute,overlap,compact",
        "--steps",
        "1",
        "--compute-s",
        "0.05",
    ]
    arguments += ["--width", "256", "--json", str(stored), "--rates", "100mbit"]
    assert links.main(arguments) == 0
    assert steps.BUCKET in " ".join(capsys.readouterr().out.split())
    content = summaries.read(stored)
    assert content["settings"]["lines"] == steps.BUCKET
    compute, overlap, compact = content["rows"]
    bytes_ = 20 * 256**2 * 4  # which each of two ranks sends once
    assert overlap["step_s"] > 0.8 * (bytes_ - 2 * 0.02 * 12.5e6) / 12.5e6
    assert all(row["step_s"] > 0 for row in (compute, compact))
    assert 0 < overlap["line_of_rate"] < 1.1


def random_residuals(windows: int = 16) -> residuals.Residuals:
    """Random residuals."""
    count = sum(p.numel() for p in CharGPT(Shape(width=64, layers=2)).parameters())
    drawn = np.random.default_rng(0)
    u, v, g = drawn.standard_normal((3, windows, count), np.float32)
    packets = np.zeros((1, windows, 1), np.int32)
    return residuals.Residuals(u, v, g[None], packets)


def test_bytes_that_ranks_receive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks beyond the windows are copies, and the bytes of all are counted."""
    real, stored, drawn = (tmp_path / name for name in ("r.npz", "out.json", "out.png"))
    residuals.store(random_residuals(), real)
    arguments = [str(real), "--elements", "400000", "--ranks", "4,32", "--json", str(stored)]
    arguments += ["--processes", "2", "--counted", "1000000"]
    assert received_bytes.main([*arguments, "--plot", str(drawn)]) == 0
    assert drawn.stat().st_size > 0
    content = summaries.read(stored)
    few, many = content["ranks"]
    assert [few["size"], many["size"]] == [4, 32]
    assert many["gather"] > 7 * few["gather"]
    assert many["sharded"] < many["sharded4"] < many["gather"]
    assert 1 <= many["busiest"] < 1.5  # drawn uniformly
    k = next(one["k"] for one in content["packets"] if one["sparsity"] == 0.999)
    assert many["fewer"] == pytest.approx(31 * 8 * k / many["sharded"])
    assert all(level["of_ring"] <= 1 / 8 for level in content["ramp"])
    for one in content["counted"]:
        assert one["received"] == pytest.approx(one["expected"], rel=0.1)
    assert "busiest" in capsys.readouterr().out
