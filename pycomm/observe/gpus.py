"""The GPUs of this host, as NVML sees them, for `pycomm top`.

The package nvidia-ml-py is optional. GPUs are those of NVML, in its order: CUDA_VISIBLE_DEVICES
does not apply.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU now. None: NVML does not know it, for example the utilisation of a MIG device.

    Attributes:
        bus_id: its PCI bus id, as in the log of a rank.
        busy_percent: share of time in which a kernel ran, over NVML's last sample period.
        memory: bytes in use, and bytes in all.
        pids: processes with a context; empty inside a container, where NVML does not know its pids.
    """

    index: int
    name: str
    bus_id: str
    busy_percent: int | None
    memory: tuple[int, int] | None
    pids: frozenset[int]


@functools.cache
def load_nvml() -> Any:
    """The initialized module pynvml; None without the package or without a driver."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or one without GPUs: there is nothing to show
        return None
    return nvml


def running() -> list[Gpu]:
    """The GPUs of this host; empty without NVML."""
    nvml, found = load_nvml(), list[Gpu]()
    for index in range(nvml.nvmlDeviceGetCount() if nvml else 0):
        with contextlib.suppress(nvml.NVMLError):  # this GPU was lost, or is not permitted
            found.append(_gpu(nvml, index))
    return found


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def known(function: Callable[[Any], Any]) -> Any:
        try:
            return function(handle)
        except nvml.NVMLError:  # not supported by this GPU, or not permitted
            return None

    rates = known(nvml.nvmlDeviceGetUtilizationRates)
    memory = known(nvml.nvmlDeviceGetMemoryInfo)
    return Gpu(
        index=index,
        name=known(nvml.nvmlDeviceGetName) or "",
        # With a domain of 8 digits; CUDA's has 4.
        bus_id=nvml.nvmlDeviceGetPciInfo(handle).busId.lower()[-12:],
        busy_percent=None if rates is None else int(rates.gpu),
        memory=None if memory is None else (int(memory.used), int(memory.total)),
        pids=frozenset(one.pid for one in known(nvml.nvmlDeviceGetComputeRunningProcesses) or ()),
    )
