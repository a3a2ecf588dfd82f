"""The machine of a measurement and its GPUs, for the demo and the benchmarks."""

from __future__ import annotations

import datetime
import math
import os
import platform
from pathlib import Path

import torch

from pycomm._core_api import devices


def describe() -> dict[str, str | int]:
    """CPU, memory and versions as JSON values; 1 MB is 2^20 bytes, the date is UTC."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def caption() -> str:
    """CPU, torch and date, for a plot."""
    where = describe()
    cores = f"{where['cpu']}, {where['cores']} cores"
    return f"{cores}, torch {where['torch']}, {where['date']}"


def busy() -> str:
    """The load of the last minute, if it exceeds the processors, and its origin; or ""."""
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    if load <= processors:
        return ""
    ended = _running() <= processors  # this process is one of them
    who = "work that has ended" if ended else "other programs, which make times longer"
    return f"load {load:.1f} on {processors} processors by {who}"


def gpus() -> tuple[list[str], str]:
    """The names of the GPUs that pycomm and torch can use, or the reason why there is none."""
    if not devices.has_cuda_module():
        return [], "pycomm._cuda is not built; put nvcc on PATH and run `make build`"
    if why := devices.cuda_module().why_not():
        return [], why
    if not torch.cuda.is_available():
        return [], f"torch {torch.__version__} finds none; a CUDA build of torch is needed"
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())], ""


def _running() -> int:
    """How many threads of this machine run or wait for a processor; the load where unknown."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except OSError:  # not Linux
        return math.ceil(os.getloadavg()[0])


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux, or not readable
        pass
    return platform.machine()
