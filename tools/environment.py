"""Makes `.venv` ready: a fitting torch, the pinned tools, the things that a build needs.

    python3 tools/environment.py               make it ready
    python3 tools/environment.py --has-torch   exit status: has this interpreter a fitting torch

The interpreter that runs this is the one that `.venv` is made for. Where it already has a fitting
torch, that environment is used as it is: `.venv` is laid over it and takes only what is missing
there, and nothing is installed into it. The Makefile calls this before everything else; once all
is there it ends in a tenth of a second. Standard library only.
"""

import hashlib
import importlib.metadata
import os
import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "ready"
OLDEST_TORCH = (2, 11)
TORCH = "torch==2.13.0"  # what the project is tested on
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def has_fitting_torch() -> bool:
    """Whether this interpreter has a torch that the project works with."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2]) >= OLDEST_TORCH


def interpreter() -> str:
    """One line that names the interpreter that `.venv` is made for."""
    if inside() and STAMP.exists():
        return STAMP.read_text().splitlines()[0]
    return f"{sys.prefix} {sys.version.split()[0]}"


def wanted() -> str:
    """What the stamp holds when `.venv` is ready: the interpreter and the requirements."""
    texts = [(ROOT / "pyproject.toml").read_text(), Path(__file__).read_text()]
    return f"{interpreter()}\n{hashlib.sha256(''.join(texts).encode()).hexdigest()}\n"


def inside() -> bool:
    """Whether this very interpreter is that of `.venv`."""
    return Path(sys.prefix) == VENV


def run(*command: str | Path) -> bool:
    """Runs a command, shown first; whether it succeeded."""
    print("+", *command, flush=True)
    return subprocess.run([str(word) for word in command], check=False).returncode == 0


def need(succeeded: bool, sentence: str) -> None:
    """Ends with a sentence for the user when a step failed."""
    if not succeeded:
        sys.exit(f"pycomm: {sentence}")


def lay_over_this() -> None:
    """Lets `.venv` see the packages of this interpreter, behind its own."""
    folders = [p for p in [*site.getsitepackages(), site.getusersitepackages()] if os.path.isdir(p)]
    major, minor = sys.version_info[:2]
    own = VENV / "lib" / f"python{major}.{minor}" / "site-packages"
    (own / "environment_below.pth").write_text("\n".join(folders) + "\n")


def requirements() -> list[str]:
    """What a build, the tests and the benchmarks need beside torch, from pyproject.toml."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10; pip carries the same parser
        from pip._vendor import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["bench"], *extras["dev"]]


def install_torch(pip: list[str | Path]) -> bool:
    """A CUDA build where a GPU is; else a CPU build, from torch's own index if it answers."""
    gpu = shutil.which("nvidia-smi") is not None and run("nvidia-smi", "-L")
    from_cpu_index = ["--index-url", CPU_INDEX, "--retries", "0", "--timeout", "10"]
    if not gpu:
        if run(*pip, *from_cpu_index, TORCH):
            return True
        print(f"pycomm: {CPU_INDEX} does not give it; now from where pip looks by itself")
    return run(*pip, TORCH)


def create() -> None:
    """Creates `.venv` where there is none, or one that was made for another interpreter."""
    foreign = STAMP.exists() and STAMP.read_text().splitlines()[0] != interpreter()
    if (VENV / "bin" / "python").exists() and not foreign:
        return
    try:
        venv.create(VENV, with_pip=True, clear=foreign, symlinks=True)
    except (subprocess.CalledProcessError, OSError) as error:
        major, minor = sys.version_info[:2]
        sys.exit(
            f"pycomm: no virtual environment could be made ({error}). "
            f"On Debian: apt-get install python{major}.{minor}-venv"
        )


def make() -> None:
    """Makes what is missing of `.venv`."""
    if not inside():
        create()
    if has_fitting_torch() and not inside():
        lay_over_this()
    python = VENV / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if not run(python, __file__, "--has-torch"):
        need(install_torch(pip), f"{TORCH} could not be installed")
    need(run(*pip, *requirements()), "the packages of pyproject.toml could not be installed")


def main() -> None:
    """Makes `.venv` ready unless it is."""
    if sys.version_info < (3, 10):  # noqa: UP036 - older interpreters are who this is for
        sys.exit(f"pycomm: Python 3.10 or newer is needed, {sys.executable} is {sys.version}")
    if sys.argv[1:] == ["--has-torch"]:
        sys.exit(not has_fitting_torch())
    if STAMP.exists() and STAMP.read_text() == wanted():
        return
    make()
    STAMP.write_text(wanted())


if __name__ == "__main__":
    main()
