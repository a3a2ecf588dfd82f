"""The benchmark of compact packets: a tiny run, and errors that fail a run."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.kernels import codec as bench
from pycomm import _core, kernels
from pycomm.bench.kernels.residuals import Residuals, store
from pycomm.bench.support import summaries


def test_tiny_run_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v = np.random.default_rng(0).laplace(size=(2, 4000)).astype(np.float32)
    real, stored = tmp_path / "residuals.npz", tmp_path / "out.json"
    store(Residuals(v, v, v[None], np.zeros((1, 2, 4), np.int32)), real)
    threads = _core.kernel_threads()
    arguments = ["--count", "20000", "--most", "3000", "--rounds", "1", "--values", "2bit,float32"]
    assert bench.main([*arguments, "--residuals", str(real), "--json", str(stored)]) == 0
    assert _core.kernel_threads() == threads
    rows = [bench.Row(**row) for row in summaries.read(stored)["rows"]]
    assert [r.data for r in rows] == 12 * ["uniform"] + 12 * ["residuals"]
    for row in rows:
        assert row.indices in ("rice", "list")
        assert row.k == max(1, round(row.count * (1 - row.sparsity)))
        assert min(row.encode_rate, row.decode_rate, row.copy_rate) > 0
        by_values = 4 * row.k if row.values == "float32" else 4 + -(-row.k // 4)
        head = row.bytes_each * row.k - row.index_bits * row.k / 8 - by_values
        sizes = sum(-(-x.bit_length() // 7) for x in (row.k, row.count))
        assert head == pytest.approx(4 + sizes, abs=1e-3)  # stored with nine digits
    first = capsys.readouterr().out.splitlines()[1].split()
    assert first[:5] == ["uniform", "0.75", "3000", "2bit", "rice"]


def test_entropy_of_an_index_set() -> None:
    assert bench.entropy_bits(4, 2) == pytest.approx(np.log2(6) / 2)


def test_wrong_indices_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.unpack
    monkeypatch.setattr(kernels, "unpack", lambda p: (right(p)[0] + 1, right(p)[1]))
    with pytest.raises(AssertionError, match="other indices came back"):
        bench.main(["--count", "2000", "--most", "100", "--rounds", "1"])
