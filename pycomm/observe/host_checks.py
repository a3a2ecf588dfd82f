"""The checks of one host for `pycomm doctor`: builds, transports, limits, addresses, GPUs."""

from __future__ import annotations

import importlib.util
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

from pycomm import _c10d, _core, config
from pycomm._core_api import devices, nccl
from pycomm.errors import Error, Unsupported
from pycomm.observe import info

OK, WARNING, FAILED = "ok", "warning", "FAILED"
DESCRIPTORS_EACH = 2
"""For each peer: its connection, and the shared memory of a peer on this host."""
DESCRIPTORS_MORE = 256  # for listeners, Python, torch and the program


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        status: OK, WARNING (slow, or a part cannot be used) or FAILED (calls fail).
        text: what was found.
        advice: what to do about it; empty if OK.
    """

    name: str
    status: str
    text: str
    advice: str = ""


def check(size: int) -> list[Finding]:
    """The findings of this host, but versions and processors, for a run of `size` ranks."""
    found = [_torch_backend(), *(_transport(name) for name in config.TRANSPORTS)]
    return [*found, _descriptors(size), _memory(), _address(), _gpus()]


def versions() -> str:
    """Of pycomm, Python and torch."""
    built = f"pycomm {info.version('pycomm-collectives')}, Python {platform.python_version()}"
    return f"{built}, torch {info.version('torch')}"


def _torch_backend() -> Finding:
    """Whether a module of `_c10d` fits the installed torch and can be loaded."""
    name = "torch backend"
    if importlib.util.find_spec("torch") is None:
        return Finding(name, OK, "torch is not installed; NumPy arrays work")
    try:
        _c10d.load()
    except Unsupported as error:  # it is the finding
        what, _, remedy = str(error).partition("; ")
        return Finding(name, WARNING, what, remedy)
    return Finding(name, OK, "loaded")


def _transport(name: str) -> Finding:
    why = info.why_not(name)
    if not why:
        return Finding(f"transport {name}", OK, "two ranks communicate")
    advice = {
        "shm": "allow memfd_create and Unix sockets (a seccomp profile may forbid them)",
        "tcp": "allow connections over the loopback interface (a firewall may drop them)",
    }
    return Finding(f"transport {name}", FAILED, why, advice.get(name, "report this"))


def _descriptors(size: int) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS_EACH * size + DESCRIPTORS_MORE
    text = f"at most {soft:,} open files a process"
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Finding("open files", OK, text)
    advice = f"ulimit -n {needed}, for {size} ranks"
    return Finding("open files", WARNING if soft > size else FAILED, text, advice)


def processors(ranks: int, usable: int, most: float | None) -> Finding:
    """Whether the processors of a host suffice.

    Args:
        ranks: the ranks there.
        usable: the processors on which they may run.
        most: the host's quota().
    """
    text = f"{usable} for {ranks} {'rank' if ranks == 1 else 'ranks'}"
    if most is not None and most < usable:
        text += f", and a quota of {most:g}"
        advice = "raise the container's quota: waiting ranks use it up and are stopped"
        return Finding("processors", WARNING, text, advice)
    if ranks > usable:
        advice = "start fewer ranks, or expect that they take turns"
        return Finding("processors", WARNING, text, advice)
    return Finding("processors", OK, text)


def quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """Processors that the control group may use at once; None: all."""
    try:
        most, period = file.read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):  # no control group, or one of version 1
        return None


def _memory(file: Path = Path("/proc/meminfo")) -> Finding:
    """Shared memory counts as memory of the ranks: /dev/shm and its limit are not used."""
    lines = dict(line.split(":") for line in file.read_text().splitlines())
    mib = int(lines["MemAvailable"].split()[0]) // 1024
    text = f"{mib:,} MiB available"
    if mib < 512:
        return Finding("memory", WARNING, text, "end other programs, or raise the limit")
    return Finding("memory", OK, text)


def _address() -> Finding:
    """Whether this host has the address that is chosen for tcp."""
    chosen = config.environment().address
    if not chosen:
        return Finding("address", OK, "detected; GLOO_SOCKET_IFNAME chooses another")
    try:
        _core.check_address(chosen)
    except Error as error:  # it lists the interfaces
        return Finding("address", FAILED, str(error), "correct or unset GLOO_SOCKET_IFNAME")
    return Finding("address", OK, f"GLOO_SOCKET_IFNAME={chosen}")


def _gpus() -> Finding:
    if not devices.has_cuda_module():
        return Finding("GPUs", OK, "pycomm was built without CUDA")
    if not Path("/proc/driver/nvidia/version").exists():
        return Finding("GPUs", OK, "no NVIDIA driver")
    if reason := devices.cuda_module().why_not():
        return Finding("GPUs", WARNING, reason, "see docs/install.md, CUDA")
    try:
        library = nccl.load()
    except Error as error:  # it says which places were searched, and what to install
        return Finding("GPUs", WARNING, "no NCCL", str(error))
    return Finding("GPUs", OK, f"usable, NCCL {library.version}")
