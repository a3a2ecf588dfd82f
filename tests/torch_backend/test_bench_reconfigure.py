"""`python -m benchmarks reconfigure`, which needs torch 2.14; `make matrix` has it."""

from pathlib import Path

import pytest
import torch.distributed as dist
from bench_runs import stored

from pycomm import bench


@pytest.mark.timeout(300)  # 8 processes import torch
def test_reconfigure_is_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if not hasattr(dist, "_reconfigure"):
        assert bench.main(["reconfigure"]) == 2
        assert "2.14 is needed" in capfd.readouterr().out
        return
    rows = stored(tmp_path, "reconfigure --ranks 3 --rounds 1")["rows"]
    assert [row["backend"] for row in rows] == ["gloo", "pycomm"]
    assert all(row["kill_ms"] >= row["join_ms"] > 0 for row in rows)
