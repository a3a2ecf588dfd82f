"""Encodes or decodes many packets in one call.

For packets of a few hundred elements the checks of a Python call take longer than the codec.
"""

from __future__ import annotations

import itertools
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
    """

    indices: Any
    values: Any
    lengths: Sequence[int]


class GroupBatch(NamedTuple):
    """Packets of groups in host memory, for `decode_sum` and `decode_update`, which decode their
    values part by part. `read_groups` makes it.

    Attributes:
        packets: uint8, concatenated packets of `update_step`.
        sizes: bytes of each packet.
        indices: int32 [n], the groups of all packets, ascending within each.
        lengths: number of groups of each packet, in order; their sum is n.
        value_counts: number of values of each packet.
        group: elements of a group.
    """

    packets: Any
    sizes: Sequence[int]
    indices: Any
    lengths: Sequence[int]
    value_counts: Sequence[int]
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
    most = np.array(_core.most_compact_bytes(lengths, counts, codec, value_dtype), np.uint64)
    full = np.flatnonzero(lengths)
    most = most[full]
    ends = np.cumsum(most)
    out, packets = inputs.output(None, "out", pair[1], int(most.sum()), "uint8")
    written, lost = [packets], np.zeros(len(full), np.uint64)
    rows = rows_of(batch, pair)[full]
    if errors is not None:
        left = inputs.array(errors, "errors", (pair[1].dtype,), write=True)
        if left.count != pair[1].count:
            raise InvalidArgument(
                f"invalid errors: got {left.count} elements, expected {pair[1].count}, those of "
                "the values"
            )
        written.append(left)
        lost = np.uint64(left.pointer) + rows[:, 1] - np.uint64(pair[1].pointer)
    inputs.check_memory("encode_batch", written, pair)
    places = np.uint64(packets.pointer) + ends - most
    if not len(full):
        return [out[:0] for _ in lengths]
    rows = np.column_stack([rows, firsts[full], np.array(counts, np.uint64)[full], lost, places])
    sizes, taken = inputs.output(None, "sizes", pair[1], len(full), "int64")
    compact.encode(rows, (codec, value_dtype), pair[1], taken)
    made = {}
    columns = (full, ends - most, sizes)
    for place, begin, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        if nbytes == 0:
            raise InvalidArgument(
                f"invalid indices of packet {place}: they must ascend within its array"
            )
        made[place] = out[begin : begin + nbytes]
    return [made.get(place, out[:0]) for place in range(len(lengths))]


def decode_batch(
    packets: Any, sizes: Sequence[int], lengths: Sequence[int], counts: Sequence[int]
) -> PacketBatch:
    """Decodes packets of `encode_batch`, concatenated. On a GPU all are decoded together, and the
    call waits for the GPU once.

    Args:
        packets: uint8 [sum(sizes)]: concatenated compact packets.
        sizes: bytes of each packet; 0 for a packet without elements.
        lengths: number of elements of each packet.
        counts: elements of each array, as in `encode_batch`.

    Returns:
        The batch, on the device of the packets; its indices count through all arrays, its values
        are float32.

    Raises:
        InvalidArgument: the bytes are not compact packets of so many elements of arrays with these
            counts, or the sizes do not sum to the number of bytes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    found, sizes = concatenated(packets, sizes)
    firsts, counts = _arrays_of(counts, len(sizes))
    lengths = integers("lengths", lengths, 0, inputs.MOST_ELEMENTS)
    if len(lengths) != len(sizes):
        raise InvalidArgument(
            f"invalid lengths: got {len(lengths)}, expected one of each of {len(sizes)} packets"
        )
    if any(length for length, size in zip(lengths, sizes, strict=True) if not size):
        raise InvalidArgument("invalid lengths: a packet of 0 bytes has elements")
    nbytes = np.array(sizes, np.uint64)
    begins = np.uint64(found.pointer) + np.cumsum(nbytes) - nbytes
    columns = begins, nbytes, np.array(lengths, np.uint64), firsts, np.array(counts, np.uint64)
    return PacketBatch(*compact.decode_batch(np.column_stack(columns)[nbytes > 0], found), lengths)


def _arrays_of(counts: Sequence[int], packets: int) -> tuple[NDArray[np.uint64], list[int]]:
    """First index and elements of the array of each packet.

    Raises:
        InvalidArgument: a negative count, too many elements, or other than whole multiples of
            packets.
    """
    counts = integers("counts", counts, 0, inputs.MOST_ELEMENTS)
    integer("the sum of counts", sum(counts), 0, inputs.MOST_ELEMENTS)
    if packets % max(1, len(counts)) or (packets and not counts):
        raise InvalidArgument(
            f"invalid counts: got {len(counts)} arrays and {packets} packets, expected as many "
            "packets, or a multiple"
        )
    times = packets // max(1, len(counts))
    firsts = np.cumsum([0, *counts], dtype=np.uint64)[:-1]
    return np.tile(firsts, times), counts * times


def concatenated(packets: Any, sizes: Sequence[int]) -> tuple[ArrayRef, list[int]]:
    """The validated bytes and sizes of packets."""
    found, sizes = inputs.array(packets, "packets", ("uint8",)), integers("sizes", sizes, 0)
    if sum(sizes) != found.nbytes:
        raise InvalidArgument(
            f"invalid sizes: got a sum of {sum(sizes)} bytes, expected {found.nbytes}, those of "
            "packets"
        )
    return found, sizes


def elements_of(batch: PacketBatch) -> list[ArrayRef]:
    """The validated indices and values.

    Raises:
        InvalidArgument: wrong dtypes, or lengths that do not sum to the number of elements.
    """
    where = inputs.array(batch.indices, "indices", ("int32",))
    what = inputs.array(batch.values, "values", inputs.FLOATS)
    total = sum(integers("lengths", batch.lengths, 0))
    if not where.count == what.count == total:
        raise InvalidArgument(
            f"invalid batch: got {where.count} indices, {what.count} values and lengths with a "
            f"sum of {total}, expected the same number"
        )
    return [where, what]


def rows_of(batch: PacketBatch, elements: list[ArrayRef]) -> NDArray[np.uint64]:
    """uint64 [packets, 3]: addresses of indices and values of each packet, and its length."""
    indices, values = elements
    lengths = np.array(batch.lengths, np.uint64)
    begin = np.cumsum(lengths) - lengths
    each = np.uint64(values.nbytes // max(1, values.count))
    starts = [np.uint64(indices.pointer) + np.uint64(4) * begin]
    starts += [np.uint64(values.pointer) + each * begin]
    return np.stack([*starts, lengths], axis=1)


def group_rows_of(batch: GroupBatch) -> tuple[list[tuple[int, ...]], list[ArrayRef]]:
    """Address, bytes, groups, values and address of the indices of each packet; and the arrays.

    Raises:
        InvalidArgument: wrong dtypes, or sizes and lengths that do not fit the arrays.
    """
    found, sizes = concatenated(batch.packets, batch.sizes)
    lengths = integers("lengths", batch.lengths, 0)
    values = integers("value_counts", batch.value_counts, 0)
    where = inputs.array(batch.indices, "indices", ("int32",))
    if where.count != sum(lengths):
        raise InvalidArgument(
            f"invalid batch of groups: got {where.count} indices and lengths with a sum of "
            f"{sum(lengths)}, expected the same number"
        )
    if not len(sizes) == len(lengths) == len(values):
        raise InvalidArgument(
            f"invalid batch of groups: got {len(sizes)} sizes, {len(lengths)} lengths "
            f"and {len(values)} value_counts, expected one of each for a packet"
        )
    _on_host([found, where], "GroupBatch")
    begins = itertools.accumulate(sizes, initial=found.pointer)
    firsts = itertools.accumulate((4 * k for k in lengths), initial=where.pointer)
    # Both begin with the first address and end after the last one.
    columns = begins, sizes, lengths, values, firsts
    return list(zip(*columns, strict=False)), [found, where]


def _on_host(found: Sequence[ArrayRef], name: str) -> None:
    for one in found:
        if one.device.kind != "cpu":
            raise Unsupported(
                f"{name} needs host memory: on a GPU call encode for each packet, decode_batch or "
                "decode_groups"
            )
