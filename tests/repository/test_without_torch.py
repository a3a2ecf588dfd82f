"""Without torch: the package is built, imported and used with its own requirements alone."""

import os
import secrets
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import numpy as np
import programs
import pybind11
import pytest
from finished import finished, finished_together
from paths import ROOT

from benchmarks.support.ports import free_port

# Every call of the package, in two processes that have only a secret and an address.
BASE = """
import importlib.util, sys
import numpy as np, pycomm
from pycomm import errors
assert importlib.util.find_spec("torch") is None
group = pycomm.init(timeout_s=60)
n, me = group.size, group.rank
assert (n, pycomm.rank(), pycomm.size(), pycomm.is_initialized()) == (2, me, 2, True)
assert (pycomm.local_rank(), pycomm.local_size(), pycomm.host_count()) == (me, 2, 1)
x = np.arange(6.0).reshape(2, 3) + 10 * me
both = np.stack([np.arange(6.0).reshape(2, 3) + 10 * r for r in range(2)])
assert np.array_equal(pycomm.all_reduce(x.copy()), both.sum(0))
assert np.array_equal(pycomm.reduce(x.copy(), 1), both.sum(0) if me == 1 else x)
assert np.array_equal(pycomm.broadcast(x.copy(), 1), both[1])
assert np.array_equal(pycomm.all_gather(x), both)
gathered = pycomm.gather(x, 1)
assert gathered is None if me == 0 else np.array_equal(gathered, both)
parts = pycomm.all_gather_v(x[: me + 1])
assert [part.tolist() for part in parts] == [both[0][:1].tolist(), both[1].tolist()]
assert np.array_equal(pycomm.reduce_scatter(x), both.sum(0)[me])
assert np.array_equal(pycomm.scatter(x, 1), both[1][me])
assert np.array_equal(pycomm.all_to_all(x), both[:, me])
assert pycomm.all_reduce(x.copy(), async_op=True).result()[0, 0] == 10
if me == 0:
    pycomm.send(x, 1, tag=3)
else:
    assert np.array_equal(pycomm.recv(np.empty((2, 3)), 0, tag=3), both[0])
pycomm.barrier()
assert pycomm.all_gather_object({"rank": me, "raw": b"x"}) == [
    {"rank": 0, "raw": b"x"}, {"rank": 1, "raw": b"x"}]
pycomm.user_set(f"of {me}", [me, None])
assert pycomm.user_get(f"of {1 - me}") == [1 - me, None]
pycomm.barrier()
assert pycomm.user_pop(f"of {me}") == [me, None]
part = group.split(me)
assert part.size == 1 and group.stats().calls > 10
pycomm.set_num_threads(1)
assert pycomm.all_reduce(pycomm.empty((2, 9000), "f8") * 0 + 1).sum() == 36000
smaller = group.shrink()
assert smaller.ranks == [0, 1] and pycomm.all_reduce(np.ones(1))[0] == 2
from pycomm.testing import run_ranks
assert run_ranks(2, lambda g: int(pycomm.all_reduce(np.ones(1, int), group=g)[0])) == [2, 2]
pycomm.barrier()
pycomm.shutdown()
assert "torch" not in sys.modules
print("fine", pycomm._core.__file__)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the build requirements, NumPy and lazy_loader alone."""
    folder = tmp_path_factory.mktemp("without_torch")
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder / "env")]
    subprocess.run(command, check=True, timeout=180)
    python = folder / "env/bin/python"
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    answer = finished([python, "-c", ask], check=True)
    site = Path(answer.stdout.strip())
    import setuptools

    installed = Path(np.__file__).parent.parent
    for package in ("lazy_loader", "numpy", "numpy.libs"):
        if (installed / package).exists():
            (site / package).symlink_to(installed / package)
    (site / "pybind11").symlink_to(Path(pybind11.__file__).parent)
    for package in ("setuptools", "pkg_resources", "_distutils_hack"):
        found = Path(setuptools.__file__).parent.parent / package
        if found.exists():
            (site / package).symlink_to(found)
    return python


def clean(python: Path) -> dict[str, str]:
    """The variables for that Python: no other import paths; ninja and the compiler on PATH."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {k: v for k, v in os.environ.items() if k not in left_out and not k.startswith("PYCOMM_")}
    tools = [str(python.parent), sysconfig.get_paths()["scripts"], os.environ["PATH"]]
    return env | {"PATH": os.pathsep.join(tools)}


def use_everything(python: Path, where: Path) -> list[str]:
    """Runs BASE in two processes on the package in `where`; the module that each loaded."""
    env = clean(python) | {"PYTHONPATH": str(where), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port()), "PYCOMM_SECRET": secrets.token_hex(32)}
    env |= {"PYCOMM_SIZE": "2", "PYCOMM_LOCAL_SIZE": "2"}
    ranks = finished_together(  # cwd: the first entry of sys.path for -c
        (
            ([python, "-c", BASE], env | {"PYCOMM_RANK": rank, "PYCOMM_LOCAL_RANK": rank})
            for rank in "01"
        ),
        cwd=where,
    )
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    return [rank.stdout.removeprefix("fine ").strip() for rank in ranks]


def test_package_works_with_its_requirements_alone(environment: Path) -> None:
    import pycomm

    assert use_everything(environment, ROOT) == [pycomm._core.__file__] * 2


# A compiler that copies the objects from the existing build: they are the same, and take minutes.
# It preprocesses the sources with Python headers, since torch's are not there. It serves as nvcc.
COMPILER = """#!/bin/sh
for word in "$@"; do last=$word; done
case "$*" in
*" -shared "*) exec {cxx} "$@" ;;
*/csrc/bindings/*) mkdir -p "$(dirname "$last")" && {cxx} "$@" -E || exit 1 ;;
esac
mkdir -p "$(dirname "$last")" && cp "{built}/$last" "$last" && : > "$last.d"
"""


def copying_nvcc(folder: Path, compiler: str) -> list[str]:
    """The folders for PATH with this text as nvcc, beside the libraries of the real one, if any."""
    real = programs.nvcc()
    if real is None:
        return []
    (folder / "bin").mkdir(parents=True)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(compiler)
    nvcc.chmod(0o755)
    for name in ("lib64", "lib"):
        (folder / name).symlink_to(Path(real).resolve().parent.parent / name)
    return [str(nvcc.parent)]


def unpacked_sdist(folder: Path) -> Path:
    """The source distribution of this tree, unpacked."""
    command = [sys.executable, "setup.py", "-q", "egg_info", f"--egg-base={folder}"]
    command += ["sdist", f"--dist-dir={folder}"]
    done = finished(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_sdist_is_built_with_pybind11_alone(environment: Path, tmp_path: Path) -> None:
    built = ROOT / "build" / str(sysconfig.get_config_var("SOABI"))
    assert (built / "_core").is_dir(), "build the package in place first"
    copy, compiler = unpacked_sdist(tmp_path), tmp_path / "compiler"
    text = COMPILER.format(cxx=os.environ.get("CXX", "g++"), built=built)
    compiler.write_text(text)
    compiler.chmod(0o755)
    env = clean(environment) | {"CXX": str(compiler)}
    env["PATH"] = os.pathsep.join([*copying_nvcc(tmp_path / "cuda", text), env["PATH"]])
    done = finished(
        [environment, "setup.py", "-q", "build_ext", "--inplace"], cwd=copy, env=env, timeout=350
    )
    assert done.returncode == 0, done.stdout + done.stderr
    modules = {p.name.split(".")[0] for p in (copy / "pycomm").glob("*.so")}
    assert modules - {"_cuda"} == {"_core"}  # _cuda: where nvcc is
    commands = next((copy / "build").glob("*/build.ninja")).read_text()
    assert "/torch/" not in commands.replace(str(Path(pybind11.__file__).parent), "")
    for module in use_everything(environment, copy):
        assert Path(module).is_relative_to(copy)


def test_another_library_of_the_same_name_is_reported(tmp_path: Path) -> None:
    """`pip install pycomm` installs it."""
    (tmp_path / "pycomm").mkdir()
    (tmp_path / "pycomm" / "__init__.py").write_text("__version__ = '1.0'\n")
    code = "import pycomm_torch_autoload; pycomm_torch_autoload.register()"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = finished([sys.executable, "-c", code], env={"PYTHONPATH": path}, cwd=tmp_path)
    assert done.returncode == 0
    assert (
        f"{tmp_path}/pycomm/__init__.py is another library with the same import name" in done.stderr
    )
    assert "pip uninstall pycomm" in done.stderr
