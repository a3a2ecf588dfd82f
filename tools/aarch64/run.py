"""Builds the package for aarch64 and runs it under qemu: `make aarch64`.

    python tools/aarch64/run.py

All files are in build/aarch64: Debian's Python for arm64, packages of PyPI, and the package. That
Python, under qemu, runs setup.py, which runs the cross compiler. Then two processes make calls over
each transport, with pages of 4 and of 64 KiB, and train a model with DDP. Needs apt,
g++-aarch64-linux-gnu and qemu-user; nothing is installed.

torch's wheel for aarch64 needs CUDA. Libraries without contents replace those of CUDA, so torch
finds no device: stubs.py. cpuinfo reads the processor's description, which qemu does not emulate.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import stubs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / "build" / "aarch64"
SYSTEM, SITE, LIB, STUBS = (WORK / name for name in ("root", "site", "lib", "stubs"))
PYTHON = SYSTEM / "usr" / "bin" / "python3.11"
DEBIAN = ["python3.11", "libpython3.11-dev", "libssl3", "libstdc++6", "zlib1g"]
PACKAGES = ["lazy_loader", "numpy", "setuptools>=77", "pybind11>=3.0", "torch==2.13.0"]
PACKAGES += ["typing_extensions", "sympy", "networkx", "jinja2", "filelock"]  # of torch, as below
PACKAGES += ["fsspec", "mpmath", "markupsafe"]
WHEELS = ["manylinux2014_aarch64", "manylinux_2_27_aarch64", "manylinux_2_28_aarch64", "any"]
PAGES = (4 << 10, 64 << 10)
PROCESSOR = "neoverse-n1"  # faster than qemu's default, which has SVE
LIMIT_S = 600  # of one program
# Of one such processor; torch's library cpuinfo reads them.
MIDR = "0x00000000413fd0c1"
CPUINFO = """\
processor\t: {number}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""


def run(*command: str | Path, **options: Any) -> None:
    """Runs a command; exits if it fails."""
    done = subprocess.run([str(word) for word in command], check=False, **options)
    if done.returncode:
        sys.exit(f"aarch64: failed: {' '.join(map(str, command))}")


def get_system() -> None:
    """Debian's packages for arm64, in a folder and an apt configuration of their own."""
    state = WORK / "apt"
    for folder in ("lists/partial", "archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    line = f"deb [signed-by={key}] http://deb.debian.org/debian bookworm main\n"
    (state / "sources.list").write_text(line)
    values = {
        "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
    }
    options = [f"-o{name}={value}" for name, value in values.items()]
    run("apt-get", "-qq", *options, "update")
    install = ["-y", "--download-only", "--no-install-recommends", "install"]
    run("apt-get", "-qq", *options, *install, *DEBIAN)
    for package in sorted((state / "archives").glob("*.deb")):
        run("dpkg", "-x", package, SYSTEM)
    processors = range(os.cpu_count() or 1)
    (SYSTEM / "proc").mkdir(exist_ok=True)
    (SYSTEM / "proc" / "cpuinfo").write_text("".join(CPUINFO.format(number=n) for n in processors))
    for number in processors:
        register = f"sys/devices/system/cpu/cpu{number}/regs/identification/midr_el1"
        (SYSTEM / register).parent.mkdir(parents=True, exist_ok=True)
        (SYSTEM / register).write_text(MIDR)
    # Debian's pyconfig.h includes <aarch64-linux-gnu/python3.11/pyconfig.h>.
    headers = WORK / "headers"
    headers.mkdir(exist_ok=True)
    link = headers / "aarch64-linux-gnu"
    link.unlink(missing_ok=True)
    link.symlink_to(SYSTEM / "usr" / "include" / "aarch64-linux-gnu")


def get_packages() -> None:
    """Wheels for that Python, unpacked."""
    wheels = WORK / "wheels"
    platforms = [f"--platform={name}" for name in WHEELS]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    run(*pip, *platforms, "--python-version=3.11", "-d", wheels, *PACKAGES)
    for wheel in sorted(wheels.glob("*.whl")):
        done = SITE / f"{wheel.name}.unpacked"
        if not done.exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(SITE)
            done.touch()


def emulated(page_bytes: int = PAGES[0]) -> list[str]:
    """The emulated Python."""
    emulator = ["qemu-aarch64", "-cpu", PROCESSOR, "-p", str(page_bytes), "-L", str(SYSTEM)]
    return [*emulator, "-E", f"LD_LIBRARY_PATH={STUBS}", str(PYTHON)]


def environment(**extra: str) -> dict[str, str]:
    """The environment of the emulated Python."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return kept | {"PYTHONPATH": f"{SITE}:{LIB}", "OMP_NUM_THREADS": "1"} | extra


def build() -> None:
    """The package, into build/aarch64/lib, by setup.py under the emulated Python."""
    shutil.rmtree(LIB, ignore_errors=True)
    compiler = f"aarch64-linux-gnu-g++ -isystem {WORK / 'headers'}"
    scripts = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for ninja
    env = environment(CXX=compiler, PATH=scripts) | {"PYTHONPATH": f"{SITE}:{ROOT}"}
    program = [*emulated(), str(HERE / "build_package.py"), "-q", "build", "--build-lib", str(LIB)]
    run(*program, cwd=ROOT, env=env)


def run_ranks(program: str, page_bytes: int, **extra: str) -> None:
    """Two ranks as processes. qemu does not emulate the processes that a launcher starts."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", **extra)
    shared |= {"PYCOMM_SECRET": secrets.token_hex(32), "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [*emulated(page_bytes), str(HERE / program)],
            cwd=WORK,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    what = " ".join([program, *extra.values(), f"with pages of {page_bytes >> 10} KiB"])
    try:
        status = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(status):
        sys.exit(f"aarch64: {what}: exit status {status}")
    print(f"aarch64: {what}: passed", flush=True)


def main() -> None:
    """Builds and runs: see the head of this file."""
    for program in ("aarch64-linux-gnu-g++", "qemu-aarch64", "apt-get"):
        if shutil.which(program) is None:
            sys.exit(f"aarch64: {program} not found: install g++-aarch64-linux-gnu and qemu-user")
    WORK.mkdir(parents=True, exist_ok=True)
    get_system()
    get_packages()
    stubs.make(SITE / "torch" / "lib", STUBS)
    build()
    for page_bytes in PAGES:
        for transport in ("shm", "tcp"):
            run_ranks("all_reduce.py", page_bytes, PYCOMM_TRANSPORT=transport)
    run_ranks("ddp.py", PAGES[0])


if __name__ == "__main__":
    main()
