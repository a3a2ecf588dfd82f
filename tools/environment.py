"""Sets up `.venv`: a supported torch, the pinned tools, and the build requirements.

    python3 tools/environment.py               set up
    python3 tools/environment.py --has-torch   exit status 0: this interpreter has a supported torch

`.venv` is made for the interpreter that runs this script. If that has a supported torch, `.venv`
sees its packages and contains only what is missing there; nothing is installed into that
environment. The Makefile runs this first; if all is set up it takes a tenth of a second. Standard
library only.
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
    """Whether this interpreter has a torch that the project supports."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # the caller installs one
        return False
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2]) >= OLDEST_TORCH


def interpreter() -> str:
    """A line that identifies the interpreter for which `.venv` is made."""
    if inside() and STAMP.exists():
        return STAMP.read_text().splitlines()[0]
    return f"{sys.prefix} {sys.version.split()[0]}"


def wanted() -> str:
    """The content of the stamp of a complete `.venv`: the interpreter and the requirements."""
    texts = [(ROOT / "pyproject.toml").read_text(), Path(__file__).read_text()]
    return f"{interpreter()}\n{hashlib.sha256(''.join(texts).encode()).hexdigest()}\n"


def inside() -> bool:
    """Whether this is the interpreter of `.venv`."""
    return Path(sys.prefix) == VENV


def run(*command: str | Path) -> bool:
    """Prints and runs a command; whether it succeeded."""
    print("+", *command, flush=True)
    return subprocess.run([str(word) for word in command], check=False).returncode == 0


def need(succeeded: bool, sentence: str) -> None:
    """Exits with a message if a step failed."""
    if not succeeded:
        sys.exit(f"pycomm: {sentence}")


def lay_over_this() -> None:
    """Makes the packages of this interpreter visible in `.venv`, after its own."""
    folders = [p for p in [*site.getsitepackages(), site.getusersitepackages()] if os.path.isdir(p)]
    major, minor = sys.version_info[:2]
    own = VENV / "lib" / f"python{major}.{minor}" / "site-packages"
    (own / "environment_below.pth").write_text("\n".join(folders) + "\n")


def requirements() -> list[str]:
    """The packages of the build, tests and benchmarks except torch, from pyproject.toml."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10; pip contains the same parser
        from pip._vendor import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["bench"], *extras["dev"]]


def install_torch(pip: list[str | Path]) -> bool:
    """A CUDA build if there is a GPU; else a CPU build, from torch's own index if that answers."""
    gpu = shutil.which("nvidia-smi") is not None and run("nvidia-smi", "-L")
    from_cpu_index = ["--index-url", CPU_INDEX, "--retries", "0", "--timeout", "10"]
    if not gpu:
        if run(*pip, *from_cpu_index, TORCH):
            return True
        print(f"pycomm: {CPU_INDEX} does not provide it; trying pip's default index")
    return run(*pip, TORCH)


def create() -> None:
    """Creates `.venv` if it does not exist or was made for another interpreter."""
    foreign = STAMP.exists() and STAMP.read_text().splitlines()[0] != interpreter()
    if (VENV / "bin" / "python").exists() and not foreign:
        return
    try:
        venv.create(VENV, with_pip=True, clear=foreign, symlinks=True)
    except (subprocess.CalledProcessError, OSError) as error:
        major, minor = sys.version_info[:2]
        sys.exit(
            f"pycomm: cannot create a virtual environment ({error}). "
            f"On Debian: apt-get install python{major}.{minor}-venv"
        )


def make() -> None:
    """Creates the missing parts of `.venv`."""
    if not inside():
        create()
    if has_fitting_torch() and not inside():
        lay_over_this()
    python = VENV / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if not run(python, __file__, "--has-torch"):
        need(install_torch(pip), f"cannot install {TORCH}")
    need(run(*pip, *requirements()), "cannot install the packages of pyproject.toml")


def main() -> None:
    """Sets up `.venv` unless it is complete."""
    if sys.version_info < (3, 10):  # noqa: UP036 - for older interpreters
        sys.exit(f"pycomm: Python 3.10 or newer is needed, {sys.executable} is {sys.version}")
    if sys.argv[1:] == ["--has-torch"]:
        sys.exit(not has_fitting_torch())
    if VENV.is_symlink():  # it would be emptied for this interpreter, and installed for this folder
        sys.exit(f"pycomm: {VENV} is a symbolic link: remove it, or run make where it leads")
    if STAMP.exists() and STAMP.read_text() == wanted():
        return
    make()
    STAMP.write_text(wanted())


if __name__ == "__main__":
    main()
