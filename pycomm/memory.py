"""Arrays in memory that all ranks of a host map, so that collectives on them stage nothing.

Local: every rank allocates for itself, whether a group stands or not. Called by users, and by
pycomm.parallel for the buckets of gradients.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from pycomm import _core
from pycomm.errors import InvalidArgument
from pycomm.group import Group

__all__ = ["empty", "empty_for"]


def empty(shape: int | Sequence[int], dtype: Any, shared: bool = True) -> Any:
    """An array with arbitrary contents: a torch tensor for a torch dtype, else a NumPy array.

    With `shared` it lies in memory that the ranks of this host map into each other. An all_reduce,
    broadcast, all_gather or reduce_scatter above 16 KiB in which that holds for every rank's array
    (for its input in the last two) is carried out where the arrays lie; where one rank's array is
    of another kind all go the ordinary way. Views and slices count as the
    array they are of. It takes whole pages, which go back to the system with the last array on
    them. After a fork the child sees the parent's very memory, as with torch's `share_memory_()`.

    Raises:
        InvalidArgument: a length that is negative or no integer; more than the machine has memory.
        Unsupported: `shared` where address space or the size of files is limited.
    """
    lengths = _lengths(shape)
    torch: Any = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(dtype, torch.dtype)
    if not is_torch:
        dtype = np.dtype(dtype)
    count = math.prod(lengths)
    if not shared or count == 0:
        return (torch if is_torch else np).empty(lengths, dtype=dtype)
    memory: Any = _core.SharedMemory(min(count * dtype.itemsize, sys.maxsize))
    make = torch.frombuffer if is_torch else np.frombuffer
    return make(memory, dtype=dtype, count=count).reshape(lengths)


def _lengths(shape: Any) -> tuple[int, ...]:
    """One length or several, of any integers, NumPy's too."""
    lengths: tuple[int, ...]
    try:
        try:
            lengths = (index(shape),)
        except TypeError:  # no number
            lengths = tuple(map(index, shape))
    except TypeError:  # nor a sequence of numbers
        text = f"shape {shape!r} is neither a length nor a sequence of lengths"
        raise InvalidArgument(text, op="empty") from None
    if min(lengths, default=0) < 0:
        raise InvalidArgument(f"shape {lengths} has a negative length", op="empty")
    return lengths


def empty_for(group: Group, count: int, dtype: Any) -> Any:
    """A flat torch tensor in memory that the group's ranks map, or None where they map none."""
    memory: Any = group._core.allocate(count * dtype.itemsize) if count > 0 else None
    if memory is None:
        return None
    return sys.modules["torch"].frombuffer(memory, dtype=dtype, count=count)
