"""Many packets in one call: what hundreds of ranks have sent to this one, or are to be sent by it.

A packet of a few hundred elements is coded in less time than a call from Python is checked in.
Called by users, as pycomm.kernels, by packets.py, and by the training layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pycomm import _core, arrays
from pycomm.arrays import ArrayRef
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.kernels import compact, inputs


class PacketBatch(NamedTuple):
    """The elements of several packets, end to end.

    Attributes:
        indices: int32 [n], ascending within each packet.
        values: [n], of one float dtype.
        lengths: how many of the n elements each packet has, in order.
    """

    indices: Any
    values: Any
    lengths: Sequence[int]


def encode_batch(
    batch: PacketBatch, count: int, value_dtype: str, *, codec: str = "auto"
) -> tuple[Any, list[int]]:
    """The compact packets that `encode` writes of each, end to end.

    Args:
        batch: in host memory, with float32 or float64 values.
        count: of the array that all of them are of.
        value_dtype, codec: as of `encode`, compact ones.

    Returns:
        uint8 [the sum of their bytes], and the bytes of each: 0 of one without elements.

    Raises:
        InvalidArgument: as `encode`; lengths of other elements than there are.
        Unsupported: arrays on a GPU.
    """
    pair = elements_of(batch)
    inputs.how_many(pair[0].count and max(batch.lengths), count)
    if pair[1].dtype not in ("float32", "float64"):
        raise InvalidArgument(f"values are {pair[1].dtype}; encode takes float32 or float64")
    _on_host(pair, "encode_batch")
    lengths = list(batch.lengths)
    compact.most_bytes(0, int(count), value_dtype, codec)  # refuses what there is not
    room = _core.most_batch_bytes(lengths, int(count), codec, value_dtype)
    out, packets = inputs.output(None, "out", pair[1], room, "uint8")
    sizes: list[int] = _core.encode_batch(
        pair[0].pointer,
        pair[1].pointer,
        lengths,
        int(count),
        pair[1].dtype,
        codec,
        value_dtype,
        packets.pointer,
    )
    return out[: sum(sizes)], sizes


def decode_batch(packets: Any, sizes: Sequence[int], count: int) -> PacketBatch:
    """What `encode_batch` was given, with float32 values as they have arrived.

    Args:
        packets: uint8 [sum of sizes], in host memory: compact packets, end to end.
        sizes: bytes of each; 0 for one without elements.
        count: of the array that all of them are of.

    Raises:
        InvalidArgument: the bytes are no such packets, or of another array.
        Unsupported: they lie on a GPU.
    """
    found = inputs.array(packets, "packets", ("uint8",))
    _on_host([found], "decode_batch")
    sizes = list(sizes)
    if sum(sizes) != found.nbytes or min(sizes, default=0) < 0:
        raise InvalidArgument(f"sizes make {sum(sizes)} bytes; there are {found.nbytes}")
    lengths = _core.batch_lengths(found.pointer, sizes, int(count))
    kept = sum(lengths)
    indices, values = (arrays.new(found, (kept,), dtype) for dtype in ("int32", "float32"))
    where, what = (
        inputs.array(x, "out", (dtype,), write=True)
        for x, dtype in ((indices, "int32"), (values, "float32"))
    )
    _core.decode_batch(found.pointer, sizes, lengths, where.pointer, what.pointer)
    return PacketBatch(indices, values, lengths)


def elements_of(batch: PacketBatch) -> list[ArrayRef]:
    """Its indices and values, validated.

    Raises:
        InvalidArgument: wrong dtypes; lengths of other elements than there are.
    """
    where = inputs.array(batch.indices, "indices", ("int32",))
    what = inputs.array(batch.values, "values", inputs.FLOATS)
    total = sum(batch.lengths)
    if not where.count == what.count == total or min(batch.lengths, default=0) < 0:
        raise InvalidArgument(
            f"{where.count} indices and {what.count} values in packets of {total}"
        )
    return [where, what]


def rows_of(batch: PacketBatch, elements: list[ArrayRef]) -> NDArray[np.uint64]:
    """uint64 [packets, 3]: where indices and values of each begin, and how many there are."""
    indices, values = elements
    lengths = np.array(batch.lengths, np.uint64)
    begin = np.cumsum(lengths) - lengths
    each = np.uint64(values.nbytes // max(1, values.count))
    starts = [np.uint64(indices.pointer) + np.uint64(4) * begin]
    starts += [np.uint64(values.pointer) + each * begin]
    return np.stack([*starts, lengths], axis=1)


def _on_host(found: Sequence[ArrayRef], name: str) -> None:
    for one in found:
        if one.device.kind != "cpu":
            raise Unsupported(f"{name} works in host memory: call encode and unpack for each")
