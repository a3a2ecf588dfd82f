"""What this process holds of what it may leave behind: descriptors, threads, child processes,
memory that ranks share, files.

Called by soak.py after each epoch and by the tests after each test (tests/conftest.py).
"""

from __future__ import annotations

import contextlib
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
OURS = re.compile("pycomm(?!_)")  # pycomm_... are a launcher's, who is somebody else

Resources = dict[str, Counter[str]]
"""By kind: how many there are of each name."""


def resources() -> Resources:
    """At the moment. Threads are Python's and pycomm's own, but for those of its kernels, which
    stay for the next one. What libraries keep at hand is theirs: torch its threads, matplotlib the
    fonts that it has opened."""
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
            if not link.startswith(sys.prefix) and not link.endswith(FONTS):
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
    """Of what a descriptor is: "socket" for "socket:[12345]"; a path as it is."""
    return link if link.startswith("/") else link.partition(":[")[0]


def added(before: Resources, now: Resources) -> str:
    """What there is now and was not before, "" if nothing."""
    found = {kind: now[kind] - before[kind] for kind in now}
    return "; ".join(
        f"{some.total()} more {kind}: " + ", ".join(f"{name} x{n}" for name, n in some.items())
        for kind, some in found.items()
        if some
    )


def leaked(before: Resources) -> str:
    """What is held now and was not before, "" if nothing. Waits for what takes a moment to go, and
    as long as anything goes: on a busy machine a look at all objects takes seconds."""
    end = time.monotonic() + LEAVE_S
    while found := added(before, resources()):
        # Errors hold their frames, and these torch's graphs, which go one by one.
        if not gc.collect() and time.monotonic() > end:
            break
        time.sleep(0.01)  # the thread that sees last bytes off ends by itself: graceful_close.h
    return found
