"""Describes the machine of a measurement, for the reports of the demo and the benchmarks."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch


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


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux, or not readable
        pass
    return platform.machine()
