"""A limit under which a process cannot create a thread."""

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

UNPRIVILEGED = 65534
PR_SET_DUMPABLE = 4


@contextmanager
def no_new_threads() -> Iterator[None]:
    """No thread can be created in this process meanwhile; root has no limit, so root is dropped."""
    if os.getuid() == 0:
        os.setgid(UNPRIVILEGED)
        os.setuid(UNPRIVILEGED)
        # Otherwise peers may not read this process's memory.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
