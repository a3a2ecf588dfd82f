"""Validation of arguments and the error texts about wrong arrays. Nothing here changes an array."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycomm import _core
from pycomm._arguments import integer
from pycomm._core_api import arrays, devices
from pycomm._core_api.arrays import ArrayRef, Device, Like
from pycomm.errors import InvalidArgument

FLOATS = ("float16", "bfloat16", "float32", "float64")
MOST_ELEMENTS = 2**31 - 1
MOST_GROUP = 1024


@dataclass(slots=True)
class Spans:
    """The memory of several arrays on one device: uint64 [n, 2], addresses and bytes."""

    words: NDArray[np.uint64]
    device: Device


def array(
    x: Any, name: str, dtypes: Collection[str], *, write: bool = False, count: int | None = None
) -> ArrayRef:
    """A reference to `x`: one of `dtypes`, at most 2^31 - 1 elements; of shape [count] if given.

    Raises:
        InvalidArgument, Unsupported: as arrays.as_array_ref; a wrong dtype, number of elements or
            shape.
    """
    found = arrays.as_array_ref(x, name, write=write)
    if found.dtype not in dtypes:
        raise InvalidArgument(
            f"invalid {name}: got dtype {found.dtype}, expected {' or '.join(dtypes)}"
        )
    if found.count > MOST_ELEMENTS:
        raise InvalidArgument(
            f"{name} has {found.count} elements, and an int32 index counts at most "
            f"{MOST_ELEMENTS}: split the array"
        )
    if count is not None and found.shape != (count,):
        raise InvalidArgument(f"invalid {name}: got shape {found.shape}, expected ({count},)")
    return found


def same_shape(one: ArrayRef, other: ArrayRef, names: tuple[str, str]) -> None:
    """Raises InvalidArgument unless both have one shape, or one count and one of them is 1-D."""
    flat = len(one.shape) == 1 or len(other.shape) == 1
    if one.count != other.count or not (flat or one.shape == other.shape):
        raise InvalidArgument(f"{names[0]} has shape {one.shape}, but {names[1]} has {other.shape}")


def group_size(group: int) -> int:
    """Validates the elements of a group; raises InvalidArgument."""
    number = integer("group", group, 0, MOST_ELEMENTS)
    if number & (number - 1) or not 0 < number <= MOST_GROUP:
        low = min(1 << max(number, 1).bit_length() - 1, MOST_GROUP)
        near = sorted({low, min(2 * low, MOST_GROUP)} if number else {1})
        raise InvalidArgument(
            f"invalid group: got {number}, expected a power of two up to {MOST_GROUP}, for "
            f"example {' or '.join(map(str, near))}"
        )
    return number


def same_device(name: str, *found: ArrayRef | Spans) -> None:
    """Raises InvalidArgument unless all are on one device; `name` is the call."""
    first = found[0].device
    if any(x.device is not first and x.device != first for x in found):
        places = " and ".join(sorted({str(x.device) for x in found}))
        raise InvalidArgument(f"{name}: the arrays are on {places}: move them to one device")


def check_memory(
    name: str, written: Iterable[ArrayRef | Spans], read: Iterable[ArrayRef | Spans]
) -> None:
    """Raises InvalidArgument unless all arrays of the call `name` are on one device, and no written
    one shares memory with another."""
    sides = [*written], [*read]
    same_device(name, *sides[0], *sides[1])
    tables = [
        [Table([(x.pointer, x.nbytes) for x in side if isinstance(x, ArrayRef)])]
        + [Table(x.words) for x in side if isinstance(x, Spans)]
        for side in sides
    ]
    if _core.share_memory(*([table.address for table in side] for side in tables)):
        raise InvalidArgument(
            f"{name}: two of the arrays share memory, and one of them is written: pass copies"
        )


def output(
    x: Any, name: str, like: Like, count: int, dtype: str, *, write: bool = True
) -> tuple[Any, ArrayRef]:
    """The caller's buffer [count] of `dtype`, or a new one if x is None."""
    if x is None:
        devices.module(like.device)  # raises before memory is allocated
        x = arrays.new(like, (count,), dtype)
    return x, array(x, name, (dtype,), write=write, count=count)


def workspace(x: Any, like: Like, nbytes: int, *, zeros: bool = False) -> ArrayRef:
    """The caller's workspace, validated, or a new one of `nbytes` if x is None."""
    if x is None:
        x = arrays.new(like, (nbytes,), "uint8", zeros=zeros)
    found = array(x, "workspace", ("uint8",), write=True)
    if found.nbytes < nbytes:
        raise InvalidArgument(
            f"invalid workspace: got {found.nbytes} bytes, expected at least {nbytes}"
        )
    if found.pointer % 16:
        raise InvalidArgument(
            f"invalid workspace: got address {found.pointer:#x}, expected a multiple of 16: do "
            "not pass a slice"
        )
    return found


class Table:
    """Rows of 64-bit words for the core: addresses and counts. Must live until the core returns.

    Args:
        rows: of one length.
        owners: owners of the memory, if no other reference keeps it alive.
    """

    def __init__(
        self, rows: Sequence[Sequence[int]] | NDArray[np.uint64], owners: object = None
    ) -> None:
        self._owners = owners
        self._words = np.ascontiguousarray(rows, dtype=np.uint64)
        self.address = (_core.address(self._words), len(rows))
