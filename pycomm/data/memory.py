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
from pycomm.errors import Error, InvalidArgument, Unsupported
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
        Error: on every rank: the first rank of a host cannot store it; there the original error.
        Unsupported: on every rank: a rank cannot open files of its host's first rank, for example
            because it runs in another container (PID namespace).
    """
    group = group or default()
    hosts = group.core.hosts
    leader = hosts.index(hosts[group.rank])
    stored: Any = None
    descriptor, failure = -1, None
    if leader == group.rank and array is not None:
        try:
            descriptor, stored = _stored(array)
        except Exception as error:  # of any kind: raised on all ranks
            failure = error
    try:
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        received = objects.all_gather_object((stored, text), group=group)
        if failure is not None:
            raise failure
        for first in map(hosts.index, set(hosts)):
            name = group.peer_info()[first].host
            if received[first][1]:
                raise Error(f"share: rank {first}, the first on {name}: {received[first][1]}")
            if received[first][0] is None:
                raise InvalidArgument(f"share: rank {first}, the first on {name}, has no array")
        mapped, fault = None, ""
        try:
            mapped = _mapped(*received[leader][0])
        except OSError as error:  # sent to the others, so that all ranks raise
            fault = f"share: rank {group.rank} cannot open the memory of rank {leader}: {error}"
        if fault := next(filter(None, objects.all_gather_object(fault, group=group)), ""):
            raise Unsupported(fault)
        return mapped
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _stored(array: Any) -> tuple[int, Any]:
    """A new memfd with the array's elements, and the arguments of _mapped()."""
    source = arrays.plain(array)
    is_torch = not isinstance(source, np.ndarray)
    whole = np.ascontiguousarray(source.numpy() if is_torch else source)
    descriptor = os.memfd_create("pycomm_share")
    try:
        os.truncate(descriptor, max(1, whole.nbytes))
        with mmap.mmap(descriptor, max(1, whole.nbytes)) as target:
            target.write(whole.reshape(-1).view(np.uint8).data)
    except BaseException:  # the caller does not get the descriptor
        os.close(descriptor)
        raise
    file = os.getpid(), descriptor, *_identity(os.fstat(descriptor))
    return descriptor, (file, whole.dtype.str, list(whole.shape), is_torch)


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
