"""Arrays in memory that all ranks of a host map, so that collectives on them need no staging copy.

Allocation is local: it needs no group and no other rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from pycomm import _core
from pycomm._arguments import flag, refuse, shown
from pycomm.errors import InvalidArgument
from pycomm.group import Group

MOST_DIMENSIONS = 32


def empty(shape: int | Sequence[int], dtype: Any, shared: bool = True) -> Any:
    """An uninitialized array: a torch tensor for a torch dtype, else a NumPy array.

    Shared memory speeds up all_reduce, broadcast, all_gather and reduce_scatter above 16 KiB
    between ranks of one host: they access the peers' arrays in place. This needs every rank's array
    (in the last two calls: input) to be shared; otherwise all ranks use the ordinary path. Views
    and slices of a shared array count as shared. Memory is allocated in whole pages and freed with
    the last array that uses them. After a fork parent and child share the memory, as with torch's
    `share_memory_()`.

    Args:
        shape: one length or a sequence of lengths, in elements.
        dtype: a torch dtype, or anything that np.dtype() takes.
        shared: allocate memory that the other ranks of this host can map.

    Raises:
        InvalidArgument: a length is negative or not an integer, or the machine lacks the memory.
        Unsupported: `shared`, but address space or file size is limited (ulimit).
    """
    lengths, shared = _lengths(shape), flag("shared", shared)
    torch: Any = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(dtype, torch.dtype)
    if not is_torch:
        try:
            dtype = np.dtype(dtype)
        except (TypeError, ValueError, RuntimeError):  # NumPy's text may contain a large value
            refuse("dtype", dtype, "a dtype of NumPy or torch")
        if dtype.hasobject or not dtype.itemsize:
            refuse("dtype", str(dtype), "a dtype of elements with a fixed size")
    count = math.prod(lengths)
    if len(lengths) > MOST_DIMENSIONS:
        refuse("shape", str(lengths), f"at most {MOST_DIMENSIONS} lengths")
    if not shared or count == 0:
        try:
            return (torch if is_torch else np).empty(lengths, dtype=dtype)
        except (MemoryError, RuntimeError, ValueError):  # torch's, and NumPy's two
            refuse("shape", str(lengths), "an array that fits the machine's memory")
    memory: Any = _core.SharedMemory(min(count * dtype.itemsize, sys.maxsize))
    make = torch.frombuffer if is_torch else np.frombuffer
    return make(memory, dtype=dtype, count=count).reshape(lengths)


def _lengths(shape: Any) -> tuple[int, ...]:
    """A shape as a tuple of one or more ints; accepts any integer type, such as NumPy's."""
    lengths: tuple[int, ...]
    try:
        try:
            lengths = (index(shape),)
        except TypeError:  # not a number
            lengths = tuple(map(index, shape))
    except (TypeError, ValueError, RuntimeError):  # nor a sequence of numbers
        text = f"invalid shape: got {shown(shape)}, expected a length or a sequence of lengths"
        raise InvalidArgument(text, op="empty") from None
    if min(lengths, default=0) < 0:
        raise InvalidArgument(
            f"invalid shape: got {lengths}, expected none of them negative", op="empty"
        )
    return lengths


def empty_for(group: Group, count: int, dtype: Any) -> Any:
    """A flat torch tensor in memory that the group's ranks map; None if they cannot map any."""
    memory: Any = group.core.allocate(count * dtype.itemsize) if count > 0 else None
    if memory is None:
        return None
    return sys.modules["torch"].frombuffer(memory, dtype=dtype, count=count)
