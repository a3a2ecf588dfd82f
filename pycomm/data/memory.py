"""pycomm.data.share: one copy of an array per host."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

import numpy as np

from pycomm import objects
from pycomm._core_api import arrays
from pycomm.default_group import default
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import Group

__all__ = ["share"]


def share(array: Any, *, group: Group | None = None) -> Any:
    """Maps the array of each host's first rank into all ranks of the host. Collective.

    The memory has no name in the file system and is freed with the last array that uses it.

    Args:
        array: a NumPy array or CPU tensor; ignored, and may be None, except on the first rank of
            each host.
        group: the group to call in; None: the default group.

    Returns:
        NumPy: a read-only array. torch: a tensor whose pages are copied when this rank writes to
            them.

    Raises:
        InvalidArgument: on every rank: the first rank of a host has no array.
        Unsupported: on every rank: a rank cannot open files of its host's first rank, for example
            because it runs in another container (PID namespace).
    """
    group = group or default()
    hosts = group.core.hosts
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
        file = os.getpid(), descriptor, *_identity(os.fstat(descriptor))
        note = (file, whole.dtype.str, list(whole.shape), is_torch)
    try:
        notes = objects.all_gather_object(note, group=group)
        for first in map(hosts.index, set(hosts)):
            if notes[first] is None:
                name = group.peer_info()[first].host
                raise InvalidArgument(f"share: rank {first}, the first on {name}, has no array")
        mapped, fault = None, ""
        try:
            mapped = _mapped(*notes[leader])
        except OSError as error:  # sent to the others, so that all ranks raise
            fault = f"share: rank {group.rank} cannot open the memory of rank {leader}: {error}"
        if fault := next(filter(None, objects.all_gather_object(fault, group=group)), ""):
            raise Unsupported(fault)
        return mapped
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _mapped(where: tuple[int, int, int, int], dtype: str, shape: list[int], is_torch: bool) -> Any:
    """The array in the file that another process has open; `where`: its pid, descriptor, identity.

    Checks before opening: the path may belong to another process, and opening its pipe would block.
    """
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    access = mmap.ACCESS_COPY if is_torch else mmap.ACCESS_READ
    pid, descriptor, *identity = where
    path = f"/proc/{pid}/fd/{descriptor}"
    if [*_identity(os.stat(path))] != identity:  # another process: its ids are not ours
        raise OSError(f"process {pid} is a different process here")
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), max(1, count * kind.itemsize), access=access)
    array = np.frombuffer(memory, kind, count).reshape(shape)
    return sys.modules["torch"].from_numpy(array) if is_torch else array


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Device and inode, which identify a file."""
    return status.st_dev, status.st_ino
