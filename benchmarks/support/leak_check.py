"""The resources of this process that may leak: descriptors, threads, child processes, shared
memory, files. soak.py checks them after each epoch, tests/conftest.py after each test. And its
memory, which soak.py and tests/reliability/test_memory.py check.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

LEAVE_S = 5.0
TASKS = Path("/proc/self/task")
MEMORY = re.compile("memfd:pycomm[^ \n]*")
FONTS = (".ttf", ".otf", ".ttc")  # matplotlib's own, or the system's
GPUS = "/dev/nvidia"
M_ARENA_MAX = -8  # of malloc.h
OURS = re.compile("pycomm(?!_)")  # pycomm_... belong to a launcher, another process

Resources = dict[str, Counter[str]]
"""By kind: how many there are of each name."""


def resources() -> Resources:
    """Counts them now. Threads are Python's and pycomm's, except those of its kernels, which stay
    for the next call. Caches of libraries are not counted: torch's threads, matplotlib's open
    fonts, CUDA's descriptors of GPUs, which increase with use and stay until the process ends."""
    found: Resources = {
        "descriptors": Counter(),
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "children": Counter(),
        "mappings": Counter(MEMORY.findall(Path("/proc/self/maps").read_text())),
        "files": Counter(),
    }
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that reads the folder
            link = os.readlink(f"/proc/self/fd/{number}")
            if not link.startswith((sys.prefix, GPUS)) and not link.endswith(FONTS):
                found["descriptors"][_kind(link)] += 1
    for task in os.listdir(TASKS):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found["children"] += Counter((TASKS / task / "children").read_text().split())
            name = (TASKS / task / "comm").read_text().strip()
            if name.startswith("pycomm-") and name != "pycomm-kernel":
                found["threads"][name] += 1
    for folder in ("/dev/shm", tempfile.gettempdir()):
        with contextlib.suppress(OSError):  # there is no such folder
            ours = (f"{folder}/{name}" for name in os.listdir(folder) if OURS.match(name))
            found["files"] += Counter(ours)
    return found


def _kind(link: str) -> str:
    """The kind of a descriptor: "socket" for "socket:[12345]"; a path unchanged."""
    return link if link.startswith("/") else link.partition(":[")[0]


def added(before: Resources, now: Resources) -> str:
    """The resources that are new since `before`, "" if none."""
    found = {kind: now[kind] - before[kind] for kind in now}
    return "; ".join(
        f"{some.total()} more {kind}: " + ", ".join(f"{name} x{n}" for name, n in some.items())
        for kind, some in found.items()
        if some
    )


def leaked(before: Resources) -> str:
    """The resources that are new since `before`, "" if none. Waits while any is being released: on
    a busy machine a scan of all objects takes seconds."""
    end = time.monotonic() + LEAVE_S
    while found := added(before, resources()):
        # Errors hold their frames, and these torch's graphs, which are freed one by one.
        if not gc.collect() and time.monotonic() > end:
            break
        time.sleep(0.01)  # the thread of graceful_close.h ends by itself
    return found


def one_arena() -> None:
    """Lets malloc serve new threads from one arena. Other arenas keep free memory, even after a
    trim: tens of megabytes within minutes, which would look like a leak."""
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def memory_mb() -> float:
    """The memory of this process, without the free memory of malloc."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _, resident, shared, *_ = (int(n) for n in Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 2**20
