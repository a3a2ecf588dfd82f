"""`pycomm bench` and `python -m benchmarks`: the table of benchmarks, help, missing packages."""

import importlib
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
from pycomm.__main__ import NEEDS, main
from pycomm.bench.collectives import benchmark as collectives
from pycomm.bench.kernels import benchmark as kernels
from pycomm.bench.support import packages


def test_benchmark_name_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert "got none, expected one of collectives, kernels" in capsys.readouterr().err
    assert command.main(["poetry"], "python -m benchmarks") == 2
    assert "python -m benchmarks: invalid benchmark: got poetry" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["-m", "pycomm", "bench"], ["-m", "benchmarks"]])
def test_help_lists_every_benchmark(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments, "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    for name, benchmark in command.BENCHMARKS.items():
        assert re.search(rf"^  {name} +{re.escape(benchmark.help)}$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", command.BENCHMARKS)
def test_every_benchmark_has_a_main(name: str) -> None:
    assert callable(importlib.import_module(command.BENCHMARKS[name].module).main)


def test_every_main_of_a_benchmark_is_a_command() -> None:
    main = re.compile(r"^def main\(argv: Sequence\[str\][^,\n]*\) -> int:", re.MULTILINE)
    files = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "pycomm" / "bench").rglob("*.py")]
    with_main = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if main.search(file.read_text())
    }
    # Called by gpu.py and by links.py.
    others = {"benchmarks.gpu.gpu_ranks", "benchmarks.training.steps"}
    assert with_main - others == {one.module for one in command.BENCHMARKS.values()}


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("rich", "matplotlib") else there(name),
    )
    assert command.main(["collectives"]) == 2
    assert capsys.readouterr().err == (
        'pycomm bench collectives: needs rich: pip install "rich>=13"\n'
    )
    assert command.main(["training"]) == 2
    assert 'needs rich and matplotlib: pip install "rich>=13" "m' in capsys.readouterr().err
    assert demo.main([]) == 2
    assert "pycomm demo: needs rich and matplotlib" in capsys.readouterr().err
    for benchmark in (collectives, kernels):
        with pytest.raises(SystemExit):
            benchmark.main(["--plot", "out.png"])
        assert "--plot needs matplotlib: pip install" in capsys.readouterr().err


@pytest.mark.parametrize("name", NEEDS)
def test_commands_name_a_missing_package(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main([name, "--help"]) == 2
    assert f"pycomm: {name} needs {NEEDS[name]}: pip install" in capsys.readouterr().err


def test_requirements_are_those_of_the_extras() -> None:
    extras = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{wanted}"' in extras for wanted in packages.REQUIREMENTS.values())


def test_benchmarks_beside_the_package_are_found(tmp_path: Path) -> None:
    """As `pycomm` after `make build`: of the repository only the package is on the path."""
    (tmp_path / "pycomm").symlink_to(ROOT / "pycomm")
    done = subprocess.run(
        [sys.executable, "-m", "pycomm", "bench", "gpu", "--list"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "shared-multi-rank" in done.stdout
