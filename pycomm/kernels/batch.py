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
from pycomm._core_api import arrays
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
    batch: PacketBatch, count: int, value_dtype: str, *, codec: str = "auto"
) -> tuple[Any, list[int]]:
    """Encodes each packet of a batch as `encode` does and concatenates the results.

    Args:
        batch: in host memory; values are float32 or float64.
        count: number of elements of the array that the indices refer to, the same for all packets.
        value_dtype: dtype of encoded values, as in `encode` with a compact codec.
        codec: "auto", "list", "bitmap" or "rice", as in `encode`.

    Returns:
        (packets, sizes): uint8 [sum(sizes)], and the bytes of each packet. A packet without
        elements has 0 bytes.

    Raises:
        InvalidArgument: as `encode`; or the lengths do not sum to the number of elements.
        Unsupported: the arrays are on a GPU.
    """
    instance("batch", batch, PacketBatch, "a PacketBatch")
    pair, count = elements_of(batch), integer("count", count, 0, inputs.MOST_ELEMENTS)
    lengths = integers("lengths", batch.lengths, 0, count)
    if pair[1].dtype not in ("float32", "float64"):
        raise InvalidArgument(
            f"invalid values: got dtype {pair[1].dtype}, expected float32 or float64"
        )
    _on_host(pair, "encode_batch")
    compact.most_bytes(0, count, value_dtype, codec)  # validates value_dtype and codec
    capacity = _core.most_batch_bytes(lengths, count, codec, value_dtype)
    out, packets = inputs.output(None, "out", pair[1], capacity, "uint8")
    sizes: list[int] = _core.encode_batch(
        pair[0].pointer,
        pair[1].pointer,
        lengths,
        count,
        pair[1].dtype,
        codec,
        value_dtype,
        packets.pointer,
    )
    return out[: sum(sizes)], sizes


def batch_lengths(packets: Any, sizes: Sequence[int], count: int) -> list[int]:
    """Number of elements of each packet, from their headers.

    Args:
        packets: uint8 [sum(sizes)] in host memory: concatenated compact packets.
        sizes: bytes of each packet; 0 for a packet without elements.
        count: number of elements of the array that the indices refer to.

    Raises:
        InvalidArgument: as `decode_batch`.
        Unsupported: the packets are on a GPU.
    """
    found, sizes = concatenated(packets, sizes)
    _on_host([found], "batch_lengths")
    return _core.batch_lengths(
        found.pointer, sizes, integer("count", count, 0, inputs.MOST_ELEMENTS)
    )


def decode_batch(
    packets: Any, sizes: Sequence[int], count: int, *, lengths: Sequence[int] | None = None
) -> PacketBatch:
    """Decodes the result of `encode_batch`.

    On a GPU all packets are decoded together, and the call waits for the GPU once.

    Args:
        packets: uint8 [sum(sizes)]: concatenated compact packets.
        sizes: bytes of each packet; 0 for a packet without elements.
        count: number of elements of the array that the indices refer to.
        lengths: number of elements of each packet, from `batch_lengths`. Only for packets on a
            GPU, where they are required.

    Returns:
        The batch, on the device of the packets; its values are float32.

    Raises:
        InvalidArgument: the bytes are not compact packets of an array of `count` elements, or the
            sizes do not sum to the number of bytes. Or the packets are on a GPU and there are no
            lengths, or other ones than sizes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    found, sizes = concatenated(packets, sizes)
    count = integer("count", count, 0, inputs.MOST_ELEMENTS)
    if found.device.kind != "cpu":
        return _decode_on_device(found, sizes, count, lengths)
    lengths = _core.batch_lengths(found.pointer, sizes, count)
    kept = sum(lengths)
    indices, values = (arrays.new(found, (kept,), dtype) for dtype in ("int32", "float32"))
    where, what = (
        inputs.array(x, "out", (dtype,), write=True)
        for x, dtype in ((indices, "int32"), (values, "float32"))
    )
    _core.decode_batch(found.pointer, sizes, lengths, where.pointer, what.pointer)
    return PacketBatch(indices, values, lengths)


def concatenated(packets: Any, sizes: Sequence[int]) -> tuple[ArrayRef, list[int]]:
    """The validated bytes and sizes of packets."""
    found, sizes = inputs.array(packets, "packets", ("uint8",)), integers("sizes", sizes, 0)
    if sum(sizes) != found.nbytes:
        raise InvalidArgument(
            f"invalid sizes: got a sum of {sum(sizes)} bytes, expected {found.nbytes}, those of "
            "packets"
        )
    return found, sizes


def _decode_on_device(
    packets: ArrayRef, sizes: list[int], count: int, lengths: Sequence[int] | None
) -> PacketBatch:
    if lengths is not None:
        lengths = integers("lengths", lengths, 0)
    if lengths is None or len(lengths) != len(sizes):
        raise InvalidArgument(
            f"invalid lengths: got {lengths}, expected one of each of {len(sizes)} packets on a GPU"
        )
    full = [i for i, size in enumerate(sizes) if size]
    if any(lengths[i] for i, size in enumerate(sizes) if not size):
        raise InvalidArgument("invalid lengths: a packet of 0 bytes has elements")
    if not full:
        indices, values = (arrays.new(packets, (0,), dtype) for dtype in ("int32", "float32"))
        return PacketBatch(indices, values, list(lengths))
    each = [sizes[i] for i in full], [lengths[i] for i in full]
    indices, values = compact.decode_batch(packets, each, count)
    return PacketBatch(indices, values, list(lengths))


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
