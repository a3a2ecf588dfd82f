"""The benchmark of the kernels: a tiny run on random residuals, and errors that fail a run."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pycomm
from pycomm import _core, kernels
from pycomm.bench.kernels import benchmark as bench
from pycomm.bench.kernels import (
    comparison,
    device_timing,
    single_kernels,
    sparse,
    torch_steps,
    verification,
)
from pycomm.bench.kernels.residuals import STEPS, WORKERS, Residuals, load, store
from pycomm.bench.kernels.table import Row
from pycomm.bench.support import summaries

PARAMETERS = 20_000  # of a window
TRAINING = {"DGC", "decode_update", "dgc_step", "topk"}
TRAINING |= {"dgc_step bfloat16", "dgc_step cold", "dgc_step x 161"}
ALONE = {
    "cast": {"copy_", ".to"},
    "clip_": {"clip_grad_norm_"},
    "decode_sum": {"index_add_"},
    "encode": {"torch.cat"},
    "momentum_mask": {"index_fill_", "mul_ by a mask"},
    "norm": {"vector_norm", "in float64"},
    "reduce_": {"add_", "stack.sum"},
    "scatter_add": {"index_add_"},
    "threshold": {"torch.topk"},
    "unpack": {"view"},
}


def write_residuals(path: Path, parameters: int) -> Path:
    """Random residuals, one window for each worker."""
    rng = np.random.default_rng(0)
    k = max(1, parameters // 1000)
    sent = [
        np.sort(rng.choice(parameters, k, replace=False).astype(np.int32))
        for _ in range(STEPS * WORKERS)
    ]
    made = rng.standard_normal((2 + STEPS, WORKERS, parameters)).astype(np.float32)
    packets = np.stack(sent).reshape(STEPS, WORKERS, k)
    store(Residuals(made[0], made[1], made[2:], packets), path)
    return path


@pytest.fixture
def residuals(tmp_path: Path) -> Iterator[Path]:
    before = torch.get_num_threads(), _core.kernel_threads()
    yield write_residuals(tmp_path / "residuals.npz", PARAMETERS)
    pycomm.shutdown()
    torch.set_num_threads(before[0])
    pycomm.set_num_threads(before[1])


def run(residuals: Path, *arguments: str) -> int:
    sizes = f"{PARAMETERS},{WORKERS * PARAMETERS}"
    given = ["--residuals", str(residuals), "--rounds", "1", "--threads", "2", "--sizes", sizes]
    return bench.main([*given, "--peers", "eager", *arguments])


def test_tiny_run_is_stored_and_plotted(
    residuals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, drawn = tmp_path / "out.json", tmp_path / "out.png"
    status = run(residuals, "--json", str(stored), "--plot", str(drawn))
    content: dict[str, Any] = summaries.read(stored)
    rows = [Row(**row) for row in content["rows"]]
    others = {(r.kernel, r.peer) for r in rows if r.peer != "pycomm"}
    assert {("dgc_step", "eager"), ("topk", "torch.topk"), ("DGC", "through p.grad")} < others
    assert {(kernel, peer) for kernel, peers in ALONE.items() for peer in peers} < others
    for count in (20_000, 160_000):
        own = {r.kernel: r for r in rows if r.count == count and r.peer == "pycomm"}
        assert own.keys() == TRAINING | ALONE.keys()
        counted = {"cast": 6, "clip_": 12, "norm": 4, "reduce_": 4 * (STEPS + 1), "encode": 4}
        counted |= {name: 20 for name in own if name.startswith("dgc_step")}
        counted |= {"dgc_step bfloat16": 18}
        for kernel, each in counted.items():
            assert own[kernel].limit_bytes == pytest.approx(each * count, abs=64)
    for row in rows:
        assert row.limit_percent == pytest.approx(100 * row.limit_ms / row.time_ms)
        assert (row.peer == "pycomm") <= (row.ratio == 1)
        assert (row.kernel, row.peer) != ("dgc_step", "pycomm") or row.step_percent == 100
    fast = [r for r in rows if r.limit_percent > 103]
    assert status == (1 if fast else 0)
    output = capsys.readouterr().out
    assert output.count("the limit is wrong") == len(fast)
    assert content["settings"]["residuals"] in output
    assert drawn.stat().st_size > 10_000


def test_named_kernels_run_with_the_step(
    residuals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(residuals, "--kernels", "topk,norm")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {row[0] for row in rows if "pycomm" in row[2:3]}
    assert shown == {"dgc_step", "topk", "norm"}
    with pytest.raises(SystemExit):
        run(residuals, "--kernels", "topk,wrong")
    assert "'wrong' is not among" in capsys.readouterr().err


def test_limit_is_the_slowest_of_read_write_and_copy() -> None:
    """Loops that read at 30, write at 20 and do both at 40: no loop reads at 40."""
    speeds = {"step": comparison.Traffic(24, 16), "read": comparison.Traffic(30, 0)}
    speeds["fill"] = comparison.Traffic(0, 20)
    for moved, seconds in (((30, 0), 1), ((0, 40), 2), ((24, 16), 1), ((60, 2), 2)):
        assert bench._limit(speeds, comparison.Traffic(*moved)) == seconds
    # A faster read or fill limits a mixture only if the mixture is almost one of them.
    fast = {"read": comparison.Traffic(120, 0), "fill": comparison.Traffic(0, 80)}
    for moved, seconds in (((24, 16), 1), ((80, 40), 1), ((40, 80), 1.5)):
        assert bench._limit(speeds | fast, comparison.Traffic(*moved)) == seconds


def test_kernel_faster_than_the_limit_fails_the_run(
    residuals: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = bench.measured

    def too_fast(*arguments: Any) -> list[Row]:
        return [dataclasses.replace(row, limit_percent=104.0) for row in measured(*arguments)]

    monkeypatch.setattr(bench, "measured", too_fast)
    assert run(residuals) == 1
    assert "pycomm: topk of 20000 runs at 104 %: the limit is wrong" in capsys.readouterr().out


def test_wrong_bit_fails_the_run(
    residuals: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = kernels.topk

    def wrong(*arguments: Any, **options: Any) -> Any:
        indices, values = right(*arguments, **options)
        values[-1:] = torch.nextafter(values[-1:], torch.tensor(9.0))
        return indices, values

    monkeypatch.setattr(kernels, "topk", wrong)
    assert run(residuals) == 1
    assert "20000 elements: topk: pycomm and the reference differ" in capsys.readouterr().out


def comparisons() -> list[comparison.Comparison]:
    x, *gradients = torch.randn((7, 5_003), generator=torch.Generator().manual_seed(2))
    kept = [torch.arange(i, x.numel(), 97, dtype=torch.int32) for i in range(3)]
    return single_kernels.comparisons(x, [(i, x[i]) for i in kept], gradients)


def test_each_compared_kernel_is_checked(tmp_path: Path) -> None:
    """One number of one result changed, by a bit, or by a hundredth where torch rounds
    differently."""
    found, here = comparisons(), device_timing.Cpu()
    assert {c.kernel: c.calls.keys() - {"pycomm"} for c in found} == ALONE
    recorded = load(write_residuals(tmp_path / "residuals.npz", 2_000))
    steps, choices = {"eager": torch_steps.eager}, {"torch.topk": torch_steps.torch_topk}
    found += sparse.comparisons(sparse.Case(recorded, 9_000), steps, choices)
    for one in found:
        assert verification.all_wrong([one], here) == ""
        for peer, call in one.calls.items():
            if peer in one.skipped:
                continue
            bad = corrupted(call, peer == "pycomm" or not one.rounding)
            wrong = dataclasses.replace(one, calls=one.calls | {peer: bad})
            assert (
                verification.all_wrong([wrong], here)
                == f"{one.kernel}: {peer} and the reference differ"
            )


def corrupted(call: comparison.Call, exact: bool) -> comparison.Call:
    def wrong(step: int) -> list[Any]:
        results = [torch.as_tensor(x).clone().reshape(-1) for x in call(step)]
        last = results[-1]
        at = last.abs().argmax()
        if exact:
            last.view(torch.uint8)[at * last.itemsize] ^= 1
        else:
            last[at] *= 1.01
        return results

    return wrong


def test_bandwidth_loops_move_the_stated_bytes() -> None:
    """Sizes that are no multiple of a vector or of a thread's range."""
    rng = np.random.default_rng(1)
    for count in (0, 1, 17, 300_001):
        grad, u, v = rng.standard_normal((3, count)).astype(np.float32)
        moved, pointers = u + grad, [int(x.ctypes.data) for x in (grad, u, v)]
        summed = v + moved
        _core.stream_step(*pointers, count)
        assert (u.tobytes(), v.tobytes()) == (moved.tobytes(), summed.tobytes())
        for nontemporal in (False, True):
            copy = np.zeros(count + 2, np.float32)
            _core.stream_copy(pointers[0], int(copy[1:].ctypes.data), count, nontemporal)
            assert copy[1:-1].tobytes() == grad.tobytes()
            assert copy[0] == copy[-1] == 0
