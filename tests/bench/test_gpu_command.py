"""`make gpu` without a GPU: the list of parts, a part that fails or hangs, and the message if no
part can run. The parts themselves need GPUs, except for the logic of their programs.
"""

import dataclasses
import math
import sys
import time
from pathlib import Path

import pytest
from without_gpus import python

from benchmarks.gpu import gpu, gpu_kills, gpu_ranks, gpu_steps
from pycomm.bench.support import processes, summaries


def test_parts_are_existing_commands_and_cover_every_file_with_devices() -> None:
    one, eight = gpu.parts(1, Path("there")), gpu.parts(8, Path("there"))
    several = [
        "kills",
        "calls",
        "steps",
        "memory",
        "layers",
        "training",
        *gpu.EXAMPLES,
        "bench-collectives",
    ]
    assert [part.name for part in eight if part not in one] == several
    assert len({part.name for part in eight}) == len(eight)
    page = (gpu.ROOT / "docs" / "internals" / "cuda_testing.md").read_text()
    for part in eight:
        assert part.command[0] == sys.executable or str(gpu.GPU_CHECK) in part.command
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
    outcome = gpu.run_part(part("hangs", code), tmp_path / "log.txt", 2)
    assert "not over after 2 s" in outcome.failure


def test_a_budget_is_kept_and_each_outcome_is_stored_at_once(tmp_path: Path) -> None:
    """A part that does not fit is left out, a shorter one behind it runs, and one that hangs ends
    with its share."""
    stored = tmp_path / "gpu.json"
    hangs = dataclasses.replace(part("hangs", "import time; time.sleep(1000)"), share_s=1.5)
    seen = dataclasses.replace(
        part("seen", f"print('hangs' in open({str(stored)!r}).read())"), share_s=60
    )
    long = dataclasses.replace(part("long", "print()", limit_s=1), share_s=5000)
    absent = dataclasses.replace(part("absent", "print()"), missing="no such tool")
    begin = time.monotonic()
    assert gpu.run([long, hangs, absent, seen], tmp_path, [], begin + 300) == 1
    assert time.monotonic() - begin < 300
    assert (tmp_path / "seen.txt").read_text() == "True\n"
    rows = summaries.read(stored)["parts"]
    assert [row["name"] for row in rows] == ["long", "hangs", "absent", "seen"]
    assert rows[0]["left_out"].startswith("needs 5000 s, and ")
    assert "not over after 2 s" in rows[1]["failure"]
    assert rows[2]["left_out"] == "no such tool"
    assert (rows[3]["failure"], rows[3]["left_out"]) == ("", "")
    assert gpu.run([seen], tmp_path, [], begin) == 0
    assert "0 s are left" in summaries.read(stored)["parts"][0]["left_out"]


def test_shapes_are_those_of_resnet_50() -> None:
    assert sum(math.prod(shape) for shape in gpu_steps.resnet50_shapes()) == 25_557_032


def test_a_killed_rank_is_reported_in_host_memory() -> None:
    found = gpu_kills.kill("spins", "cpu")
    assert (found["outcome"], found["error"]) == ("fine", "PeerLost")


@pytest.mark.parametrize("way", ["gloo", "DGC, coded", "Quantize"])
def test_steps_are_measured_in_host_memory(way: str) -> None:
    (row,) = gpu_steps.measure(gpu_steps.time_steps, (way, "cpu", None, ((300, 100), (40,))), 2)
    assert row["steps"] == way
    assert 0 < row["ms"] <= row["worst_ms"]
    assert (row["waits"], row["launches"]) == (0, 0)


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
