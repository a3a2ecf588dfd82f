"""Setup of a rank's process: variables, processors, device, and its end when the launcher dies.

The launchers set the variables; the rank's own process does the rest before the user's code runs.
"""

from __future__ import annotations

import os

from pycomm._process_pool import die_with
from pycomm.errors import InvalidArgument

CORES_PER_RANK = 2  # default without devices


def variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """pycomm's variables of a rank; torchrun's are set as well."""
    return {
        "PYCOMM_RANK": str(rank),
        "PYCOMM_SIZE": str(size),
        "PYCOMM_LOCAL_RANK": str(local_rank),
        "PYCOMM_LOCAL_SIZE": str(local_size),
    }


def default_count(devices: int) -> int:
    """The default number of ranks of this host: one per device, or per two processors."""
    return devices or max(1, len(os.sched_getaffinity(0)) // CORES_PER_RANK)


def shared_devices(count: int, devices: int) -> str:
    """A text about this host's ranks and devices if ranks share one; else empty."""
    if not 0 < devices < count:
        return ""
    return f"on {devices} GPUs: NCCL refuses two ranks of a group on one GPU"


def share_of(local_size: int) -> int:
    """The processors of each of several ranks; 0: they share all of this host."""
    return len(os.sched_getaffinity(0)) // local_size if local_size > 1 else 0


def cores_of(local_rank: int, cores_per_rank: int) -> list[int]:
    """The processors of a rank, among those that its launcher may use.

    Raises:
        InvalidArgument: there are too few.
    """
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[local_rank * cores_per_rank : (local_rank + 1) * cores_per_rank]
    if len(mine) < cores_per_rank:
        raise InvalidArgument(
            f"{local_rank + 1} ranks with {cores_per_rank} processors each need "
            f"{(local_rank + 1) * cores_per_rank}, but this process may use {len(cores)}: pass a "
            "smaller --cpus-per-rank, or 0 to bind to none"
        )
    return mine


def threads_for(local_size: int, cores_per_rank: int | None) -> dict[str, str]:
    """The number of threads of torch's kernels in each rank, unless the environment sets it."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    share = cores_per_rank or max(1, len(os.sched_getaffinity(0)) // local_size)
    return {"OMP_NUM_THREADS": str(share)}


def setup_worker(parent: int, local_rank: int, cores_per_rank: int | None, device: bool) -> None:
    """Sets up a rank's process; call it first. The process dies with `parent`, its launcher.

    Args:
        parent: the launcher's process id.
        local_rank: this rank's number on its host.
        cores_per_rank: bind it to so many processors; None: shared by all ranks.
        device: make the CUDA device of its number the current one.
    """
    die_with(parent)
    if cores_per_rank is not None:
        os.sched_setaffinity(0, cores_of(local_rank, cores_per_rank))
    if device:
        import torch

        torch.cuda.set_device(local_rank % torch.cuda.device_count())
