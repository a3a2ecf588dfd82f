"""`make gpu` without a GPU: the list of parts, a part that fails or hangs, and the message if no
part can run. The parts themselves need GPUs, except for the logic of their programs.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from without_gpus import python

from benchmarks.gpu import gpu, gpu_ranks
from pycomm.bench.support import processes


def test_every_part_is_an_existing_command() -> None:
    one, eight = gpu.parts(1, Path("there")), gpu.parts(8, Path("there"))
    several = ["layers", "training", *gpu.EXAMPLES, "bench-collectives"]
    assert [part.name for part in eight if part not in one] == several
    assert len({part.name for part in eight}) == len(eight)
    for part in eight:
        assert part.command[0] == sys.executable or part.name in gpu.SANITIZERS
        assert part.limit_s > 0
        for word in part.command:
            assert not word.startswith(("tests/", "examples/")) or (gpu.ROOT / word).exists(), word
    page = (gpu.ROOT / "docs" / "internals" / "cuda_testing.md").read_text()
    assert all(f"`{part.name}`" in page for part in eight)


def test_every_file_with_devices_is_in_a_part() -> None:
    listed = {word for part in gpu.parts(1, Path("there")) for word in part.command}
    listed = {Path(word).stem for word in listed if word.startswith("tests/")}
    named = {file.stem for file in (gpu.ROOT / "tests").rglob("test_*device*.py")}
    # A benchmark's stored results, and the benchmark of kernels, which is a part of its own.
    named -= {"test_device_calls", "test_bench_kernels_devices"}
    assert {"test_device_hosts", "test_parallel_devices", "test_c10d_devices"} <= named
    assert named - listed == set()
    assert {"test_kernels", "test_kernel_packets", "test_dgc_compact"} <= listed


def test_missing_gpu_is_reported(tmp_path: Path) -> None:
    done = python("-m", "benchmarks", "gpu", "--results", str(tmp_path / "gpu"))
    assert done.returncode == gpu.NO_GPU
    assert done.stderr.count("\n") == 1
    assert "no GPU can be used here: " in done.stderr
    assert not (tmp_path / "gpu").exists()


def part(name: str, code: str, limit_s: float = 60) -> gpu.Part:
    return gpu.Part(name, [sys.executable, "-c", code], limit_s)


def test_failing_part_does_not_stop_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = [
        part("wrong", "print('as far as here'); raise SystemExit(4)"),
        part("dead", "import os; os.abort()"),
        part("fine", "print('hello')"),
    ]
    assert gpu.run(chosen, tmp_path, ["a GPU"]) == 1
    shown = capfd.readouterr().out
    assert "as far as here" in shown
    assert "not fine: wrong, dead" in shown
    assert (tmp_path / "fine.txt").read_text() == "hello\n"
    stored = json.loads((tmp_path / "gpu.json").read_text())
    assert stored["gpus"] == ["a GPU"]
    failures = {one["name"]: one["failure"] for one in stored["parts"]}
    assert failures == {"wrong": "ended with 4", "dead": "killed by signal 6", "fine": ""}
    assert gpu.run(chosen[2:], tmp_path, []) == 0


def test_a_part_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    outcome = gpu.run_part(part("hangs", code, limit_s=5), tmp_path / "log.txt")
    assert "not over after 5 s" in outcome.failure
    child = int((tmp_path / "log.txt").read_text())
    deadline = time.monotonic() + 60
    while _runs(child):  # the kernel takes a moment
        assert time.monotonic() < deadline


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):  # it ended
        return False


def test_losses_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for way, ours, status in [
        ("pycomm", [2.0, 1.0], 0),
        ("pycomm", [2.0, 1.0005], 0),
        ("pycomm", [2.0, 1.01], 1),
        ("pycomm", [2.0, 2.0], 1),
        ("pycomm", [2.0], 1),
        ("DGC", [2.0, 1.5], 0),
        ("DGC", [2.0, 2.0], 1),
    ]:
        assert gpu_ranks.judge({"nccl": [2.0, 1.0], way: ours}) == status, (way, ours)
    assert "largest difference" in capsys.readouterr().out


def test_training_part_equals_gloo() -> None:
    losses: dict[str, list[float]] = {}
    for way in ("gloo", *gpu_ranks.TRAINED):
        if way == "nccl":
            continue
        by_rank: dict[int, list[float]] = {}
        processes.run(gpu_ranks.train, (way, "cpu"), 2, by_rank.__setitem__)
        assert by_rank[0] == by_rank[1]
        losses[way] = by_rank[0]
    assert losses["DGC"] != losses["DataParallel"]
    assert gpu_ranks.judge(losses) == 0
