"""A rank's place: its variables, its processors, its device, and its end when the launcher dies.

Called by command.py and function.py for the variables, and by the rank's own process, before the
user's code runs, for the rest.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from pycomm.errors import InvalidArgument

__all__ = ["cores_of", "default_count", "setup_worker", "threads_for", "variables"]

PR_SET_PDEATHSIG = 1
CORES_PER_RANK = 2  # without devices, if nothing is said


def variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """pycomm's own variables of a rank; torchrun's go beside them."""
    return {
        "PYCOMM_RANK": str(rank),
        "PYCOMM_SIZE": str(size),
        "PYCOMM_LOCAL_RANK": str(local_rank),
        "PYCOMM_LOCAL_SIZE": str(local_size),
    }


def default_count(devices: int) -> int:
    """How many ranks this host gets if nothing is said: one per device, or per two processors."""
    return devices or max(1, len(os.sched_getaffinity(0)) // CORES_PER_RANK)


def cores_of(local_rank: int, cores_per_rank: int) -> list[int]:
    """The processors of a rank, of those that its launcher may use.

    Raises:
        InvalidArgument: there are not so many.
    """
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[local_rank * cores_per_rank : (local_rank + 1) * cores_per_rank]
    if len(mine) < cores_per_rank:
        raise InvalidArgument(
            f"{local_rank + 1} ranks with {cores_per_rank} processors each need "
            f"{(local_rank + 1) * cores_per_rank}, and this host offers {len(cores)}"
        )
    return mine


def threads_for(local_size: int, cores_per_rank: int | None) -> dict[str, str]:
    """How many threads torch's kernels take in each rank, unless the environment says already."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    share = cores_per_rank or max(1, len(os.sched_getaffinity(0)) // local_size)
    return {"OMP_NUM_THREADS": str(share)}


def setup_worker(parent: int, local_rank: int, cores_per_rank: int | None, device: bool) -> None:
    """In a rank's process, first of all: it takes its place and dies with `parent`, its launcher.

    Args:
        parent: the launcher's process id.
        local_rank: this rank among those of its host.
        cores_per_rank: bind it to so many processors; None: it shares them all.
        device: make the CUDA device of its number the current one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before that
        sys.exit("pycomm: the launcher has gone")
    if cores_per_rank is not None:
        os.sched_setaffinity(0, cores_of(local_rank, cores_per_rank))
    if device:
        import torch

        torch.cuda.set_device(local_rank % torch.cuda.device_count())
