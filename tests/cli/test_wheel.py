"""The wheel, installed outside the repository: the demo and the benchmarks that it contains run."""

import os
import re
import site
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from finished import finished
from paths import ROOT
from sample import of_the_day

from pycomm.bench.support import netns
from tools import wheel as tools_wheel

Pycomm = Callable[..., subprocess.CompletedProcess[str]]

NEEDS_HOSTS = pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())

pytestmark = pytest.mark.timeout(900)  # a build, if the compiled modules are old

# Trains for 8 steps; the benchmark itself trains for 608 where it gets no recording.
RECORD = """
import sys
from pathlib import Path
from pycomm.bench.kernels import residuals
residuals.store(residuals.record(2, 1), Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, for the installed torch. setup.py builds in build/, where `make
    build` has left the objects."""
    return tools_wheel.build(tmp_path_factory.mktemp("wheel"), {})


@pytest.fixture(scope="module")
def wheel(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the name that auditwheel gives it."""
    return tools_wheel.repair(built, tmp_path_factory.mktemp("repaired"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and this environment's other packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    command += ["-q", "--disable-pip-version-check", "--no-index", "--no-deps", str(wheel)]
    done = finished(command)
    assert done.returncode == 0, done.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path file does not read other path files, so pycomm's editable installation is not found.
    places = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("\n".join([*places, *site.getsitepackages()]) + "\n")
    return folder


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Pycomm:
    """Runs a program of the environment in an empty folder."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return finished(
            [str(installed / "bin" / program), *arguments], cwd=tmp_path, env=env, timeout=400
        )

    return run


def test_wheel_contains_the_package_and_the_entry_point_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "pycomm",
        "pycomm_torch_autoload.py",
    }
    sources = {
        str(file.relative_to(ROOT))
        for suffix in ("*.py", "*.pyi", "*.cu", "py.typed")
        for file in (ROOT / "pycomm").rglob(suffix)
    }
    assert sources - set(names) == set()


def test_the_name_has_the_oldest_glibc_and_no_library_is_added(built: Path, wheel: Path) -> None:
    assert re.search(r"-manylinux_2_\d+_(x86_64|aarch64)\.whl$", wheel.name)
    metadata = re.compile(r"\.dist-info/(WHEEL|RECORD)$")
    names = [zipfile.ZipFile(file).namelist() for file in (built, wheel)]
    kept = [{n for n in some if not (n.endswith("/") or metadata.search(n))} for some in names]
    assert kept[0] == kept[1]
    assert any(re.match(r"pycomm/_c10d/torch_\d+_\d+\.", name) for name in kept[1])


def test_quick_wheel_replaces_older_ones(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the command says before the build how long it takes."""
    (tmp_path / "older-1.0-py3-none-any.whl").touch()
    monkeypatch.setattr(tools_wheel, "with_requirements", lambda _: sys.executable)
    monkeypatch.setattr(tools_wheel, "build", lambda *_: print("builds") or built)
    monkeypatch.setattr(sys, "argv", ["wheel.py", "--quick", "--into", str(tmp_path)])
    tools_wheel.main()
    said, _, result = capsys.readouterr().out.partition("builds")
    assert "minutes" in said
    assert str(tmp_path / built.name) in result
    assert [file.name for file in tmp_path.glob("*.whl")] == [built.name]


def test_pycomm_comes_from_the_wheel(run: Pycomm, installed: Path) -> None:
    done = run("python", "-c", "import pycomm; print(pycomm.__file__)")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(installed)


@pytest.mark.parametrize("rate", of_the_day(["", pytest.param("1gbit", marks=NEEDS_HOSTS)], 2))
def test_demo_runs(rate: str, run: Pycomm, tmp_path: Path) -> None:
    done = run("pycomm", "demo", "--steps", "2", "--rows", "pycomm", "--rate", rate)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo.svg").exists()
    assert (tmp_path / "demo.json").exists()


def test_collectives_benchmark_runs_beside_an_mpi(run: Pycomm) -> None:
    words = ["--peers", "gloo,mpich", "--mpi-prefix", f"mpich={sys.prefix}"]
    done = run("pycomm", "bench", "collectives", "--sizes", "4,1K", "--rounds", "1", *words)
    # The status is 1 if another program disturbs the measurement of the limit.
    assert done.returncode in (0, 1), done.stderr
    assert {"pycomm", "pycomm-direct", "gloo", "mpich"} <= set(done.stdout.split())


def test_fault_injection_of_the_documentation_runs(run: Pycomm) -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    (code,) = (
        text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "FaultPlan" in text
    )
    done = run("python", "-c", code)
    assert done.returncode == 0, done.stderr


def test_kernels_benchmark_runs(run: Pycomm) -> None:
    recorded = run("python", "-c", RECORD, "recorded.npz")
    assert recorded.returncode == 0, recorded.stderr
    arguments = ["--residuals", "recorded.npz", "--sizes", "4096", "--rounds", "1"]
    arguments += ["--threads", "1", "--peers", "eager"]
    done = run("pycomm", "bench", "kernels", *arguments, "--plot", "kernels.svg")
    # The status is 1 if another program disturbs the measurement of the limit.
    assert done.returncode in (0, 1), done.stderr
    assert "dgc_step" in done.stdout, done.stderr


def test_benchmark_of_the_repository_reports_its_location(run: Pycomm) -> None:
    done = run("pycomm", "bench", "faults")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "pycomm bench faults: it is not in the package: "
        "run `python -m benchmarks faults` in pycomm's repository\n"
    )
