"""The benchmarks of the kernels and of compact packets: small runs, and errors that fail a run."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_runs import stored

import pycomm
from benchmarks.kernels import codec, comparisons
from pycomm import _core, kernels
from pycomm.bench.kernels import benchmark as bench
from pycomm.bench.kernels import comparison, device_timing, sparse, torch_steps, verification
from pycomm.bench.kernels.command import main
from pycomm.bench.kernels.residuals import STEPS, WORKERS, Residuals, load, store
from pycomm.bench.kernels.table import Row

PARAMETERS = 20_000  # of a window
TRAINING = {"DGC", "decode_update", "dgc_step", "topk"}
TRAINING |= {"dgc_step bfloat16", "dgc_step cold", "dgc_step x 161", "update_step", "quantize"}
TRAINING |= {"read_groups"}
ALONE = {"cast", "clip_", "decode_sum", "encode", "momentum_mask", "norm", "reduce_", "scatter_add"}
ALONE |= {"threshold", "unpack"}


def write_residuals(path: Path, parameters: int) -> Path:
    """Random residuals, one window for each worker."""
    rng = np.random.default_rng(0)
    made = rng.standard_normal((2 + STEPS, WORKERS, parameters)).astype(np.float32)
    k = max(1, parameters // 1000)
    sent = [np.sort(rng.choice(parameters, k, replace=False)) for _ in range(STEPS * WORKERS)]
    packets = np.stack(sent).astype(np.int32).reshape(STEPS, WORKERS, k)
    store(Residuals(made[0], made[1], made[2:], packets), path)
    return path


@pytest.fixture
def words(tmp_path: Path) -> Iterator[str]:
    """The command line of a small run."""
    before = torch.get_num_threads(), _core.kernel_threads()
    residuals = write_residuals(tmp_path / "residuals.npz", PARAMETERS)
    sizes = f"{PARAMETERS},{WORKERS * PARAMETERS}"
    yield f"--residuals {residuals} --rounds 1 --threads 2 --sizes {sizes} --peers eager"
    pycomm.shutdown()
    torch.set_num_threads(before[0])
    pycomm.set_num_threads(before[1])


def test_kernels_run(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has the bytes of its limit, which one that is faster than 103 % fails."""
    measured = bench.measured

    def too_fast(*arguments: Any) -> list[Row]:
        return [
            dataclasses.replace(row, limit_percent=104.0 if row.kernel == "topk" else 50.0)
            for row in measured(*arguments)
        ]

    monkeypatch.setattr(bench, "measured", too_fast)
    content = stored(tmp_path, f"kernels {words}", plot=True, status=1)
    rows = [Row(**row) for row in content["rows"]]
    others = {(r.kernel, r.peer) for r in rows if r.peer != "pycomm"}
    assert {("dgc_step", "eager"), ("topk", "torch.topk"), ("DGC", "through p.grad")} < others
    assert {("update_step", "foreach"), ("read_groups", "decode_batch")} < others
    assert {kernel for kernel, _ in others} >= ALONE
    for count in (20_000, 160_000):
        own = {r.kernel: r for r in rows if r.count == count and r.peer == "pycomm"}
        assert own.keys() == TRAINING | ALONE
        counted = {"cast": 6, "clip_": 12, "norm": 4, "reduce_": 4 * (STEPS + 1), "encode": 4}
        counted |= {name: 20 for name in own if name.startswith("dgc_step")}
        counted |= {"dgc_step bfloat16": 18, "update_step": 20, "quantize": 12 + 3 / 8}
        for kernel, each in counted.items():
            assert own[kernel].limit_bytes == pytest.approx(each * count, abs=512)
        assert own["dgc_step"].ratio == own["dgc_step"].step_percent / 100 == 1
    output = capsys.readouterr().out
    assert "pycomm: topk of 20000 runs at 104 %: the limit is wrong" in output
    assert content["settings"]["residuals"] in output


def test_named_kernels_run_with_the_step(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [*words.split(), "--kernels", "topk,norm"]
    main(chosen)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {row[0] for row in rows if "pycomm" in row[2:3]} == {"dgc_step", "topk", "norm"}
    with pytest.raises(SystemExit):
        main([*chosen[:-1], "topk,wrong"])
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


def test_each_compared_kernel_is_checked(tmp_path: Path) -> None:
    """One number of one result changed, by a bit, or by a hundredth where torch rounds
    differently."""
    recorded = load(write_residuals(tmp_path / "residuals.npz", 2_000))
    steps, choices = {"eager": torch_steps.eager}, {"torch.topk": torch_steps.torch_topk}
    case, here = sparse.Case(recorded, 9_000), device_timing.Cpu()
    found = sparse.comparisons(case, steps, choices) + comparisons.comparisons(case, steps, False)
    for one in found:
        assert verification.all_wrong([one], here) == ""
        for peer in one.calls.keys() - one.skipped:
            bad = corrupted(one.calls[peer], peer == "pycomm" or not one.rounding)
            wrong = dataclasses.replace(one, calls=one.calls | {peer: bad})
            message = f"{one.kernel}: {peer} and the reference differ"
            assert verification.all_wrong([wrong], here) == message


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


# ---- compact packets -----------------------------------------------------------------------------


def test_codec_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v = np.random.default_rng(0).laplace(size=(2, 4000)).astype(np.float32)
    store(Residuals(v, v, v[None], np.zeros((1, 2, 4), np.int32)), tmp_path / "r.npz")
    threads = _core.kernel_threads()
    words = "codec --count 20000 --most 3000 --rounds 1 --values 2bit,float32"
    content = stored(tmp_path, f"{words} --residuals {tmp_path / 'r.npz'}")
    assert _core.kernel_threads() == threads
    assert [r["data"] for r in content["rows"]] == 12 * ["uniform"] + 12 * ["residuals"]
    for row in content["rows"]:
        k, count = row["k"], row["count"]
        assert row["indices"] in ("rice", "list")
        assert k == max(1, round(count * (1 - row["sparsity"])))
        assert min(row["encode_rate"], row["decode_rate"], row["copy_rate"]) > 0
        by_values = 4 * k if row["values"] == "float32" else 4 + -(-k // 4)
        head = row["bytes_each"] * k - row["index_bits"] * k / 8 - by_values
        sizes = sum(-(-x.bit_length() // 7) for x in (k, count))
        assert head == pytest.approx(5 + sizes, abs=1e-3)  # stored with nine digits
    assert "index_bits" in capsys.readouterr().out


def test_entropy_and_wrong_indices_of_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert codec.entropy_bits(4, 2) == pytest.approx(np.log2(6) / 2)
    right = kernels.unpack
    monkeypatch.setattr(kernels, "unpack", lambda p: (right(p)[0] + 1, right(p)[1]))
    with pytest.raises(AssertionError, match="other indices came back"):
        codec.main(["--count", "2000", "--most", "100", "--rounds", "1"])
