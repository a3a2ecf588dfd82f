"""`pycomm bench` and `python -m benchmarks`: the table of benchmarks, help, missing packages."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from pycomm import bench as command
from pycomm import demo
from pycomm.bench.collectives import benchmark as collectives
from pycomm.bench.kernels import command as kernels
from pycomm.bench.support import packages


def test_benchmark_name_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert "got none, expected one of collectives, kernels" in capsys.readouterr().err
    assert command.main(["colectives"], "python -m benchmarks") == 2
    shown = capsys.readouterr().err
    assert "python -m benchmarks: invalid benchmark: got colectives" in shown
    assert ": did you mean collectives?" in shown


@pytest.mark.parametrize("module", ["pycomm bench", "benchmarks"])
def test_help_lists_every_benchmark(module: str) -> None:
    words = [sys.executable, "-m", *module.split(), "--help"]
    shown = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    for name, benchmark in command.BENCHMARKS.items():
        assert re.search(rf"^  {name} +{re.escape(benchmark.help)}$", shown, re.MULTILINE)


def test_the_benchmarks_are_the_modules_with_a_main() -> None:
    main = re.compile(r"^def main\(argv: Sequence\[str\][^,\n]*\) -> int:", re.MULTILINE)
    files = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "pycomm" / "bench").rglob("*.py")]
    found = [
        file.relative_to(ROOT).with_suffix("") for file in files if main.search(file.read_text())
    ]
    # Called by gpu.py and by links.py.
    others = {
        *(f"benchmarks.gpu.gpu_{name}" for name in ("kills", "ranks", "steps")),
        "benchmarks.training.steps",
    }
    listed = {one.module for one in command.BENCHMARKS.values()}
    assert {".".join(file.parts) for file in found} - others == listed


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there, absent = importlib.util.find_spec, ("torch", "matplotlib")
    found = lambda name: None if name in absent else there(name)  # noqa: E731 - read as one line
    monkeypatch.setattr(importlib.util, "find_spec", found)
    assert command.main(["collectives"]) == 2
    assert capsys.readouterr().err == (
        'pycomm bench collectives: needs torch: pip install "torch>=2.11"\n'
    )
    assert command.main(["training"]) == 2
    assert 'needs torch and matplotlib: pip install "torch>=2.11" "m' in capsys.readouterr().err
    assert demo.main([]) == 2
    assert "pycomm demo: needs torch and matplotlib" in capsys.readouterr().err
    for benchmark in (collectives, kernels):
        with pytest.raises(SystemExit):
            benchmark.main(["--plot", "out.png"])
        assert "--plot needs matplotlib: pip install" in capsys.readouterr().err
    extras = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{wanted}"' in extras for wanted in packages.REQUIREMENTS.values())


def test_benchmarks_beside_the_package_are_found(tmp_path: Path) -> None:
    """As `pycomm` after `make build`: of the repository only the package is on the path."""
    (tmp_path / "pycomm").symlink_to(ROOT / "pycomm")
    words = [sys.executable, "-m", "pycomm", "bench", "gpu", "--list"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "shared-multi-rank" in done.stdout
