"""`make gpu` without a GPU: the list of parts, a part that fails or hangs, and the message if no
part can run. The parts themselves need GPUs, except for the logic of their programs.
"""

import sys
from pathlib import Path

import pytest
from without_gpus import python

from benchmarks.gpu import gpu, gpu_ranks
from pycomm.bench.support import processes, summaries


def test_parts_are_existing_commands_and_cover_every_file_with_devices() -> None:
    one, eight = gpu.parts(1, Path("there")), gpu.parts(8, Path("there"))
    several = ["layers", "training", *gpu.EXAMPLES, "bench-collectives"]
    assert [part.name for part in eight if part not in one] == several
    assert len({part.name for part in eight}) == len(eight)
    page = (gpu.ROOT / "docs" / "internals" / "cuda_testing.md").read_text()
    for part in eight:
        assert part.command[0] == sys.executable or part.name in gpu.SANITIZERS
        assert part.limit_s > 0
        assert f"`{part.name}`" in page
    words = {word for part in one for word in part.command}
    listed = {word for word in words if word.startswith(("tests/", "examples/"))}
    assert [word for word in listed if not (gpu.ROOT / word).exists()] == []
    named = {file.stem for file in (gpu.ROOT / "tests").rglob("test_*device*.py")}
    # A benchmark's stored results, and the benchmark of kernels, which is a part of its own.
    named -= {"test_device_calls", "test_bench_kernels_devices"}
    assert {"test_device_hosts", "test_parallel_devices", "test_c10d_devices"} <= named
    named |= {"test_kernels", "test_kernel_packets", "test_dgc_compact"}
    assert named <= {Path(word).stem for word in listed}


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
    wrong = part("wrong", "print('as far as here'); raise SystemExit(4)")
    dead, fine = part("dead", "import os; os.abort()"), part("fine", "print('hello')")
    assert gpu.run([wrong, dead, fine], tmp_path, ["a GPU"]) == 1
    shown = capfd.readouterr().out
    assert "as far as here" in shown
    assert "not fine: wrong, dead" in shown
    assert (tmp_path / "fine.txt").read_text() == "hello\n"
    stored = summaries.read(tmp_path / "gpu.json")
    assert stored["gpus"] == ["a GPU"]
    failures = {one["name"]: one["failure"] for one in stored["parts"]}
    assert failures == {"wrong": "ended with 4", "dead": "killed by signal 6", "fine": ""}
    assert gpu.run([fine], tmp_path, []) == 0


def test_a_part_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    """A child that lived on would hold the output open, and run_part() waits for its end."""
    code = "import subprocess; subprocess.run(['sleep', '1000'])"
    outcome = gpu.run_part(part("hangs", code, limit_s=2), tmp_path / "log.txt")
    assert "not over after 2 s" in outcome.failure


@pytest.mark.parametrize(
    ("way", "losses", "status"),
    [
        ("pycomm", [2.0, 1.0005], 0),
        ("pycomm", [2.0, 1.01], 1),
        ("pycomm", [2.0, 2.0], 1),
        ("pycomm", [2.0], 1),
        ("DGC", [2.0, 1.5], 0),
        ("DGC", [2.0, 2.0], 1),
    ],
)
def test_losses_are_checked(way: str, losses: list[float], status: int) -> None:
    assert gpu_ranks.judge({"nccl": [2.0, 1.0], way: losses}) == status


def test_training_part_equals_gloo() -> None:
    losses: dict[str, list[float]] = {}
    for way in [way for way in ("gloo", *gpu_ranks.TRAINED) if way != "nccl"]:
        by_rank: dict[int, list[float]] = {}
        processes.run(gpu_ranks.train, (way, "cpu"), 2, by_rank.__setitem__)
        assert by_rank[0] == by_rank[1]
        losses[way] = by_rank[0]
    assert losses["DGC"] != losses["DataParallel"]
    assert gpu_ranks.judge(losses) == 0
