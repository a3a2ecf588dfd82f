"""One copy of an array per host. Called by users as pycomm.data.share."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

import numpy as np

from pycomm import arrays, collectives, values
from pycomm.errors import InvalidArgument
from pycomm.group import Group, default

__all__ = ["share"]


def share(array: Any, *, group: Group | None = None) -> Any:
    """Gives all ranks of a host the same memory with the array of the host's first rank.

    Collective. The memory has no name, so nothing is left behind, and is freed with the last array
    on it.

    Args:
        array: a NumPy array or a CPU tensor; on other ranks than the first of their host it may be
            None, and its content does not count.
        group: whose ranks; None is the default group.

    Returns:
        NumPy: a read-only array. torch, which has no such thing: a tensor whose pages become this
        rank's own when it writes to them.

    Raises:
        InvalidArgument: on every rank, where a host's first rank has no array.
    """
    group = group or default()
    hosts = [member.host for member in group.members]
    leader = hosts.index(hosts[group.rank])
    note: Any = None
    descriptor = -1
    if leader == group.rank and array is not None:
        source = arrays.plain(array)
        is_torch = not isinstance(source, np.ndarray)
        whole = np.ascontiguousarray(source.numpy() if is_torch else source)
        descriptor = os.memfd_create("pycomm_share")
        os.truncate(descriptor, max(1, whole.nbytes))
        with mmap.mmap(descriptor, max(1, whole.nbytes)) as target:
            target[: whole.nbytes] = whole.tobytes()
        note = (os.getpid(), descriptor, whole.dtype.str, list(whole.shape), is_torch)
    try:
        notes = values.all_gather_object(note, group=group)
        for host in set(hosts):
            if notes[hosts.index(host)] is None:
                raise InvalidArgument(
                    f"share: rank {hosts.index(host)}, the first on {host}, has no array"
                )
        mapped = _mapped(*notes[leader])
        collectives.barrier(group=group)
        return mapped
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _mapped(pid: int, descriptor: int, dtype: str, shape: list[int], is_torch: bool) -> Any:
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    access = mmap.ACCESS_COPY if is_torch else mmap.ACCESS_READ
    with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
        memory = mmap.mmap(file.fileno(), max(1, count * kind.itemsize), access=access)
    array = np.frombuffer(memory, kind, count).reshape(shape)
    return sys.modules["torch"].from_numpy(array) if is_torch else array
