"""Encodes or decodes many packets in one call.

For packets of a few hundred elements the checks of a Python call take longer than the codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pycomm import _core
from pycomm._arguments import instance, integer, integers
from pycomm._core_api.arrays import ArrayRef
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.kernels import compact, inputs


class PacketBatch(NamedTuple):
    """The elements of several packets, concatenated.

    Attributes:
        indices: int32 [n], ascending within each packet.
        values: [n], of one float dtype.
        lengths: number of elements of each packet, in order; their sum is n.
        group: each array of `decode_sum` and `decode_update` begins at an index that is a multiple
            of it; other indices are of no array.
    """

    indices: Any
    values: Any
    lengths: Sequence[int]
    group: int = 1


class GroupBatch(NamedTuple):
    """Packets of groups in host memory, for `decode_sum` and `decode_update`, which decode their
    values part by part. `read_groups` makes it.

    Attributes:
        packets: uint8, concatenated packets of `encode_groups`.
        sizes: bytes of each packet; 0 for a packet without groups.
        indices: int32 [n], the groups of all packets, ascending within each.
        lengths: number of groups of each packet, in order; their sum is n.
        counts: as in `read_groups`.
        group: elements of a group.
    """

    packets: Any
    sizes: Sequence[int]
    indices: Any
    lengths: Sequence[int]
    counts: Sequence[int]
    group: int


def encode_batch(
    batch: PacketBatch,
    counts: Sequence[int],
    value_dtype: str,
    *,
    codec: str = "auto",
    errors: Any = None,
) -> list[Any]:
    """Encodes each packet of a batch as `encode` does, in one set of launches on a GPU.

    Packet p is of array p % len(counts). Indices count through all arrays, concatenated; a packet
    has the indices in its own array.

    Args:
        batch: values are float32 or float64.
        counts: elements of each array. There is a packet for each of them, once or several times.
        value_dtype: dtype of encoded values, as in `encode` with a compact codec.
        codec: "auto", "list", "bitmap" or "rice", as in `encode`.
        errors: [n], of the dtype of the values: becomes value - encoded value.

    Returns:
        For each packet uint8 [its bytes]: views of one array. A packet without elements is empty.
        On a GPU the call waits for the bytes.

    Raises:
        InvalidArgument: as `encode`; or the lengths do not sum to the number of elements.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    instance("batch", batch, PacketBatch, "a PacketBatch")
    pair = elements_of(batch)
    if pair[1].dtype not in ("float32", "float64"):
        raise InvalidArgument(
            f"invalid values: got dtype {pair[1].dtype}, expected float32 or float64"
        )
    lengths = list(batch.lengths)
    firsts, counts = _arrays_of(counts, len(lengths))
    for place, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        integer(f"lengths[{place}]", length, 0, count)
    compact.most_bytes(0, 0, value_dtype, codec)  # validates value_dtype and codec
    columns = addresses_of(batch, pair)
    lost = np.zeros(len(lengths), np.uint64)
    if errors is not None:
        left = inputs.array(errors, "errors", (pair[1].dtype,), write=True)
        if left.count != pair[1].count:
            raise InvalidArgument(
                f"invalid errors: got {left.count} elements, expected {pair[1].count}, those of "
                "the values"
            )
        inputs.check_memory("encode_batch", [left], pair)
        lost = np.uint64(left.pointer) + columns[1] - np.uint64(pair[1].pointer)
    inputs.same_device("encode_batch", *pair)
    rows = [*columns, np.array(lengths, np.uint64), firsts, np.array(counts, np.uint64), lost]
    return compact.encode_full(np.column_stack(rows), (codec, value_dtype), pair[1])


def decode_batch(
    packets: Any,
    sizes: Sequence[int],
    lengths: Sequence[int],
    counts: Sequence[int],
    *,
    group: int = 1,
) -> PacketBatch:
    """Decodes packets of `encode_batch` or `encode_groups`, concatenated. On a GPU all are decoded
    together, and the call waits for the GPU once.

    Args:
        packets: uint8 [sum(sizes)]: concatenated compact packets.
        sizes: bytes of each packet; 0 for a packet without elements.
        lengths: number of elements, or groups, of each packet.
        counts: elements of each array, as in `encode_batch`; or groups: those of all arrays of each
            packet of `encode_groups`, once or several times.
        group: elements of a group, as in `encode_groups`.

    Returns:
        The batch, on the device of the packets; its indices count through all arrays, its values
        are float32.

    Raises:
        InvalidArgument: the bytes are not compact packets of so many elements of arrays with these
            counts, or the sizes do not sum to the number of bytes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    rows, found, lengths = rows_of(packets, sizes, lengths, counts, group)
    decoded = compact.decode_batch(rows, found, group)
    return PacketBatch(*decoded, [group * length for length in lengths], group)


def read_groups(
    packets: Any,
    sizes: Sequence[int],
    lengths: Sequence[int],
    counts: Sequence[int],
    *,
    group: int = 16,
) -> GroupBatch | PacketBatch:
    """Checks packets of groups and prepares them for `decode_sum` and `decode_update`.

    In host memory only the indices of groups are decoded: 4 bytes for each group, while
    `decode_batch` needs 8 bytes for each element. On a GPU it is `decode_batch`.

    Args:
        packets: as in `decode_batch`, like the others.
        sizes, lengths: bytes and groups of each packet.
        counts: the groups of each packet's arrays, as in `decode_batch`.
        group: elements of a group.

    Returns:
        The batch. In host memory it refers to `packets`, which must not change.

    Raises:
        InvalidArgument: the bytes are not packets of so many groups.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    rows, found, lengths = rows_of(packets, sizes, lengths, counts, group)
    if found.device.kind != "cpu":
        return decode_batch(packets, sizes, lengths, counts, group=group)
    table, indices = inputs.Table(rows), np.empty(sum(lengths), np.int32)
    _core.read_group_indices(table.address, group, indices.ctypes.data)
    return GroupBatch(packets, sizes, indices, lengths, counts, group)


def rows_of(
    packets: Any, sizes: Sequence[int], lengths: Sequence[int], counts: Sequence[int], group: int
) -> tuple[NDArray[np.uint64], ArrayRef, list[int]]:
    """The core's rows of the packets that are not empty; all of them; and the groups of each.

    Raises:
        InvalidArgument: numbers of other packets, or more than their elements have indices for.
    """
    found, sizes = inputs.array(packets, "packets", ("uint8",)), integers("sizes", sizes, 0)
    if sum(sizes) != found.nbytes:
        raise InvalidArgument(
            f"invalid sizes: got a sum of {sum(sizes)} bytes, expected {found.nbytes}, those of "
            "packets"
        )
    firsts, counts = _arrays_of(counts, len(sizes), inputs.group_size(group))
    lengths = integers("lengths", lengths, 0, inputs.MOST_ELEMENTS // group)
    if len(lengths) != len(sizes):
        raise InvalidArgument(
            f"invalid lengths: got {len(lengths)}, expected one of each of {len(sizes)} packets"
        )
    if any(length for length, size in zip(lengths, sizes, strict=True) if not size):
        raise InvalidArgument("invalid lengths: a packet of 0 bytes has elements")
    nbytes = np.array(sizes, np.uint64)
    begins = np.uint64(found.pointer) + np.cumsum(nbytes) - nbytes
    columns = begins, nbytes, np.array(lengths, np.uint64), firsts, np.array(counts, np.uint64)
    return np.column_stack(columns)[nbytes > 0], found, lengths


def _arrays_of(
    counts: Sequence[int], packets: int, group: int = 1
) -> tuple[NDArray[np.uint64], list[int]]:
    """First index and elements, or groups, of the array of each packet.

    Raises:
        InvalidArgument: a negative count, too many elements, or other than whole multiples of
            packets.
    """
    counts = integers("counts", counts, 0, inputs.MOST_ELEMENTS)
    integer("the sum of counts", sum(counts), 0, inputs.MOST_ELEMENTS // group)
    if packets % max(1, len(counts)) or (packets and not counts):
        raise InvalidArgument(
            f"invalid counts: got {len(counts)} arrays and {packets} packets, expected as many "
            "packets, or a multiple"
        )
    times = packets // max(1, len(counts))
    firsts = np.cumsum([0, *counts], dtype=np.uint64)[:-1]
    return np.tile(firsts, times), counts * times


def elements_of(batch: PacketBatch) -> list[ArrayRef]:
    """The validated indices and values.

    Raises:
        InvalidArgument: wrong dtypes, or lengths that do not sum to the number of elements.
    """
    where = inputs.array(batch.indices, "indices", ("int32",))
    what = inputs.array(batch.values, "values", inputs.FLOATS)
    inputs.group_size(batch.group)
    total = sum(integers("lengths", batch.lengths, 0))
    if not where.count == what.count == total:
        raise InvalidArgument(
            f"invalid batch: got {where.count} indices, {what.count} values and lengths with a "
            f"sum of {total}, expected the same number"
        )
    return [where, what]


def addresses_of(batch: PacketBatch, elements: list[ArrayRef]) -> list[NDArray[np.uint64]]:
    """Addresses of indices and values of each packet, uint64 [packets]."""
    indices, values = elements
    lengths = np.array(batch.lengths, np.uint64)
    begin = np.cumsum(lengths) - lengths
    each = np.uint64(values.nbytes // max(1, values.count))
    return [
        np.uint64(indices.pointer) + np.uint64(4) * begin,
        np.uint64(values.pointer) + each * begin,
    ]


def group_rows_of(batch: GroupBatch) -> tuple[NDArray[np.uint64], list[ArrayRef]]:
    """The core's rows: those of rows_of, and the address of the indices; and the arrays.

    Raises:
        InvalidArgument: wrong dtypes, or sizes and lengths that do not fit the arrays.
    """
    rows, found, lengths = rows_of(
        batch.packets, batch.sizes, batch.lengths, batch.counts, batch.group
    )
    where = inputs.array(batch.indices, "indices", ("int32",))
    if where.count != sum(lengths):
        raise InvalidArgument(
            f"invalid batch of groups: got {where.count} indices and lengths with a sum of "
            f"{sum(lengths)}, expected the same number"
        )
    for one in (found, where):
        if one.device.kind != "cpu":
            raise Unsupported("GroupBatch needs host memory: on a GPU call decode_batch")
    length = rows[:, 2]
    places = np.uint64(where.pointer) + np.uint64(4) * (np.cumsum(length) - length)
    return np.column_stack([rows, places]), [found, where]
