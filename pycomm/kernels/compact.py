"""Compact packets: fewer bytes for the same (index, value) pairs. csrc/codec/compact.h defines the
layout, pycomm/reference/compact.py the meaning. packets.py and batch.py validate arguments.

The length and the validity of a packet are known on the device, for which some functions wait.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycomm import _core
from pycomm._arguments import one_of
from pycomm._core_api import arrays, devices
from pycomm._core_api.arrays import ArrayRef, Like
from pycomm.errors import InvalidArgument
from pycomm.kernels import inputs

CODECS = ("auto", "list", "bitmap", "rice")
VALUES = ("float32", "bfloat16", "2bit", "1bit", "3bit")
MOST_PACKET = 2**40  # bytes: more than any packet has
MOST_HEAD = 15  # bytes of the longest header


def most_bytes(k: int, count: int, value_dtype: str, codec: str) -> int:
    """Upper bound of the bytes of a packet of k of `count` elements.

    Raises:
        InvalidArgument: an unknown codec or value_dtype.
    """
    known_codec(codec)
    one_of(f"value_dtype with codec={codec!r}", value_dtype, VALUES)
    return _core.most_compact_bytes([k], [count], 1, codec, value_dtype)[0]


def known_codec(codec: str) -> None:
    """Raises InvalidArgument for an unknown codec."""
    one_of("codec", codec, CODECS)


def encode_full(rows: NDArray[np.uint64], codes: tuple[str, str], values: ArrayRef,
                group: int = 1, tensors: tuple[int, int] = (0, 0)) -> list[Any]:  # fmt: skip
    """As `encode`, but a packet without elements is empty."""
    full = np.flatnonzero(rows[:, 2])
    made = encode(rows[full], codes, values, group, tensors)
    packets, none = dict(zip(full.tolist(), made, strict=True)), arrays.new(values, (0,), "uint8")
    return [packets.get(place, none) for place in range(len(rows))]


def encode(
    rows: NDArray[np.uint64],
    codes: tuple[str, str],
    values: ArrayRef,
    group: int = 1,
    tensors: tuple[int, int] = (0, 0),
    out: Any = None,
) -> list[Any]:
    """uint8 [its bytes] for each packet: views of one array. On a GPU it waits for the bytes.

    Args:
        rows: of each packet: addresses of indices and values, k, first group and count of the
            array, address of the errors or 0.
        codes: codec of the indices, and dtype of the encoded values.
        values: of the packets, for their dtype and device.
        group: elements of a group.
        tensors: a table of the tensors that the values are taken from.
        out: the array, or None.

    Raises:
        InvalidArgument: indices do not ascend in their range.
    """
    lengths, counts = rows[:, 2].tolist(), rows[:, 4].tolist()
    most = np.array(_core.most_compact_bytes(lengths, counts, group, *codes), np.uint64)
    ends = np.cumsum(most)
    out, room = inputs.output(out, "out", values, int(most.sum()), "uint8")
    table = inputs.Table(np.column_stack([rows, np.uint64(room.pointer) + ends - most]))
    sizes, taken = inputs.output(None, "sizes", values, len(most), "int64")
    codec, value_dtype = codes
    automatic, codec = codec == "auto", "list" if codec == "auto" else codec
    how = values.dtype, automatic, codec, value_dtype, group, tensors
    module = devices.module(values.device)
    scratch = Scratch(module.compact_encoding_bytes(table.address, *how), values)
    module.encode_compact(
        table.address,
        *how,
        taken.pointer,
        scratch.address,
        *devices.queue(values.device, values.array),
    )
    made = []
    for place, (begin, nbytes) in enumerate(
        zip((ends - most).tolist(), sizes.tolist(), strict=True)
    ):
        if nbytes == 0:
            first = int(rows[place, 3])
            raise InvalidArgument(
                f"invalid indices of packet {place}: they must ascend in "
                f"{first}..{first + counts[place] - 1}"
            )
        made.append(out[begin : begin + nbytes])
    return made


def decode_batch(rows: Any, packets: ArrayRef, group: int = 1) -> tuple[Any, Any]:
    """(indices int32 [n], values float32 [n]) of packets, in one set of launches; waits for the
    device once.

    Args:
        rows: of each packet: its address and bytes, k, first group and count of the array.
        packets: all of them, for their device.
        group: elements of a group.

    Raises:
        InvalidArgument: the bytes are not such packets.
    """
    indices, values, refused = decode(rows, packets, group)
    wrong = [i for i, bad in enumerate(refused.tolist()) if bad]
    if wrong:
        named = "elements" if group == 1 else f"groups of {group}"
        raise InvalidArgument(
            f"invalid packets: got invalid content in {wrong}, expected compact packets of "
            f"arrays with {sorted({int(row[4]) for row in rows})} {named}"
        )
    return indices, values


def decode(rows: Any, packets: ArrayRef, group: int = 1) -> tuple[Any, Any, Any]:
    """The same, and refused int32 [packets], which a GPU sets to 1 for invalid bytes; no wait."""
    kept = sum(int(row[2]) for row in rows) * group
    shapes = (kept, "int32"), (kept, "float32"), (len(rows), "int32")
    made = [arrays.new(packets, (n,), dtype) for n, dtype in shapes]
    module, table = devices.module(packets.device), inputs.Table(rows)
    scratch = Scratch(module.compact_decoding_bytes(table.address, group), packets)
    module.decode_compact(
        table.address,
        group,
        *(arrays.as_array_ref(x, "out", write=True).pointer for x in made),
        scratch.address,
        *devices.queue(packets.device, packets.array),
    )
    indices, values, refused = made
    return indices, values, refused


class Scratch:
    """A workspace of a call; none on the CPU. Must live until the core returns."""

    def __init__(self, nbytes: int, like: Like) -> None:
        self.address = 0, 0
        if nbytes:
            self._memory, found = inputs.output(None, "workspace", like, nbytes, "uint8")
            self.address = found.pointer, found.nbytes


def decoded(packet: ArrayRef, k: int, count: int) -> tuple[Any, Any]:
    """(indices int32 [k], values float32 [k]) of one packet; waits for the device.

    Raises:
        InvalidArgument: the bytes are not a packet.
    """
    return decode_batch([(packet.pointer, packet.nbytes, k, 0, count)], packet)


def header(packet: ArrayRef) -> tuple[int, int]:
    """(k, count) of a packet on any device; waits for the device.

    Raises:
        InvalidArgument: the bytes are not a packet.
    """
    some = packet.array[:MOST_HEAD]
    head = np.array(some.tolist(), np.uint8)
    return _core.read_compact_header(head.ctypes.data, head.nbytes, packet.nbytes)
