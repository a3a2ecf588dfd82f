"""One copy per host: pycomm.data.share of an array, HostMemory of any bytes."""

from __future__ import annotations

import functools
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from pycomm import objects
from pycomm._arguments import refuse
from pycomm._core_api import arrays
from pycomm.default_group import chosen
from pycomm.errors import Error, InvalidArgument, Unsupported
from pycomm.group import Group

Where = tuple[int, int, int, int]
"""Of an open file: process, descriptor, device, inode."""


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
    store = None if array is None else functools.partial(_stored, array)
    return _from_first(chosen(group), "share", store, _mapped)


class HostMemory:
    """Bytes that all ranks of a host map, initially zero, and their workers too.

    The file descriptor stays open, so that a worker that does not inherit the mapping opens it.
    """

    def __init__(self, where: Where, size: int) -> None:
        self._descriptor = _opened(where, os.O_RDWR)
        self._size = size
        weakref.finalize(self, os.close, self._descriptor)
        memory = mmap.mmap(self._descriptor, max(1, size))
        self.bytes = np.frombuffer(memory, np.uint8, size)

    @classmethod
    def allocate(cls, size: int, group: Group) -> HostMemory:
        """New bytes. Collective; all ranks of a host pass the same size.

        Raises:
            Error, Unsupported: as share.
        """
        made: HostMemory = _from_first(
            group, "shared=True", functools.partial(_reserved, size), cls
        )
        return made

    def __reduce__(self) -> Any:
        file = os.getpid(), self._descriptor, *_identity(os.fstat(self._descriptor))
        return HostMemory, (file, self._size)


def _from_first(
    group: Group,
    call: str,
    store: Callable[[], tuple[int, Any]] | None,
    attach: Callable[..., Any],
) -> Any:
    """Maps the value that the first rank of this host stored. Collective; errors name the call.

    Args:
        store: returns a descriptor and the arguments of `attach`; called on the first rank of each
            host.
        attach: maps the memory on every rank.
    """
    hosts = group.core.hosts
    leader, descriptor = hosts.index(hosts[group.rank]), -1

    def stored() -> Any:
        nonlocal descriptor
        if leader != group.rank or store is None:
            return None
        descriptor, arguments = store()
        return arguments

    def named(rank: int) -> str:
        return f"{call}: rank {rank}, the first on {group.peer_info()[rank].host}"

    try:
        received = agreed(group, stored, lambda rank, text: f"{named(rank)}: {text}")
        for first in map(hosts.index, set(hosts)):
            if received[first] is None:
                raise InvalidArgument(f"{named(first)}, has no array")
        mapped, fault = None, ""
        try:
            mapped = attach(*received[leader])
        except OSError as error:  # sent to the others, so that all ranks raise
            fault = f"{call}: rank {group.rank} cannot open the memory of rank {leader}: {error}"
        if fault := next(filter(None, objects.all_gather_object(fault, group=group)), ""):
            raise Unsupported(fault)
        return mapped
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def agreed(group: Group, fn: Callable[[], Any], failed: Callable[[int, str], str]) -> list[Any]:
    """The results of fn on all ranks, by rank. Collective. If one failed it raises its error, and
    the others an Error: failed(its rank, its error)."""
    failure: Exception | None = None
    result, text = None, ""
    try:
        result = fn()
    except Exception as error:  # of any kind: raised on all ranks
        failure, text = error, f"{type(error).__name__}: {error}"
    results = objects.all_gather_object((result, text), group=group)
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(results):
        if text:
            raise Error(failed(rank, text))
    return [result for result, _ in results]


def _stored(array: Any) -> tuple[int, Any]:
    """A new memfd with the array's elements, and the arguments of _mapped(). Raises InvalidArgument
    or Unsupported unless they are bytes in host memory."""
    source = arrays.plain(array)
    is_torch = not isinstance(source, np.ndarray)
    if not is_torch and source.dtype.hasobject:
        refuse("array", f"an array of {source.dtype}", "numbers")
    if is_torch and not source.is_complex():
        arrays.check_tensor("array", source)
    whole = np.ascontiguousarray(source.detach().numpy() if is_torch else source)
    elements = whole.reshape(-1).view(np.uint8)
    descriptor, (file, _) = _reserved(whole.nbytes)
    try:
        with mmap.mmap(descriptor, max(1, whole.nbytes)) as target:
            target.write(elements.data)
    except BaseException:  # the caller does not get the descriptor
        os.close(descriptor)
        raise
    return descriptor, (file, whole.dtype.str, list(whole.shape), is_torch)


def _reserved(size: int) -> tuple[int, Any]:
    """A new memfd of this size, and the arguments of HostMemory()."""
    descriptor = os.memfd_create("pycomm_share")
    try:
        os.truncate(descriptor, max(1, size))
    except BaseException:  # the caller does not get the descriptor
        os.close(descriptor)
        raise
    return descriptor, ((os.getpid(), descriptor, *_identity(os.fstat(descriptor))), size)


def _mapped(where: Where, dtype: str, shape: list[int], is_torch: bool) -> Any:
    """The array in the file that another process has open."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    access = mmap.ACCESS_COPY if is_torch else mmap.ACCESS_READ
    descriptor = _opened(where, os.O_RDONLY)
    try:
        memory = mmap.mmap(descriptor, max(1, count * kind.itemsize), access=access)
    finally:
        os.close(descriptor)
    array = np.frombuffer(memory, kind, count).reshape(shape)
    return sys.modules["torch"].from_numpy(array) if is_torch else array


def _opened(where: Where, mode: int) -> int:
    """A descriptor of the file that another process has open.

    Checks before opening: the path may belong to another process, and opening its pipe would block.
    """
    pid, descriptor, *identity = where
    path = f"/proc/{pid}/fd/{descriptor}"
    if [*_identity(os.stat(path))] != identity:  # another process: its ids are not ours
        raise OSError(f"process {pid} is a different process here")
    return os.open(path, mode | os.O_CLOEXEC)


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Device and inode, which identify a file."""
    return status.st_dev, status.st_ino
