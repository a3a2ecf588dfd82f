"""Compact packets: fewer bytes for the same (index, value) pairs. csrc/codec/compact.h defines the
layout, pycomm/reference/compact.py the meaning. packets.py and batch.py validate arguments.

The length and the validity of a packet are known on the device, for which some functions wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pycomm import _core
from pycomm._arguments import one_of
from pycomm._core_api import arrays, devices
from pycomm._core_api.arrays import ArrayRef
from pycomm.errors import InvalidArgument
from pycomm.kernels import inputs

CODECS = ("auto", "list", "bitmap", "rice")
VALUES = ("float32", "bfloat16", "2bit", "1bit", "3bit")
MOST_PACKET = 2**40  # bytes: more than any packet has
MOST_HEAD = 14  # bytes of the longest header


def most_bytes(k: int, count: int, value_dtype: str, codec: str) -> int:
    """Upper bound of the bytes of a packet of k of `count` elements.

    Raises:
        InvalidArgument: an unknown codec or value_dtype.
    """
    known_codec(codec)
    one_of(f"value_dtype with codec={codec!r}", value_dtype, VALUES)
    return _core.most_compact_bytes([k], [count], codec, value_dtype)[0]


def known_codec(codec: str) -> None:
    """Raises InvalidArgument for an unknown codec."""
    one_of("codec", codec, CODECS)


def encode(rows: Any, codes: tuple[str, str], values: ArrayRef, sizes: ArrayRef) -> None:
    """Writes packets, and the bytes of each into `sizes`.

    Args:
        rows: of each packet: addresses of indices and values, k, first index and count of the
            array, address of the errors or 0, and that of the packet, which has most_bytes.
        codes: codec of the indices, and dtype of the encoded values.
        values: of the packets, for their dtype and device.
    """
    module, table = devices.module(values.device), inputs.Table(rows)
    scratch = _Scratch(module.compact_encoding_bytes(table.address), values)
    module.encode_compact(
        table.address,
        values.dtype,
        codes[0] == "auto",
        codes[0] if codes[0] != "auto" else "list",
        codes[1],
        sizes.pointer,
        scratch.address,
        *devices.queue(values.device, values.array),
    )


def decode_batch(rows: Any, packets: ArrayRef) -> tuple[Any, Any]:
    """(indices int32 [n], values float32 [n]) of packets, in one set of launches; waits for the
    device once.

    Args:
        rows: of each packet: its address and bytes, k, first index and count of the array.
        packets: all of them, for their device.

    Raises:
        InvalidArgument: the bytes are not such packets.
    """
    kept = sum(int(row[2]) for row in rows)
    shapes = (kept, "int32"), (kept, "float32"), (len(rows), "int32")
    made = [arrays.new(packets, (n,), dtype) for n, dtype in shapes]
    into = [
        inputs.array(x, "out", (dtype,), write=True)
        for x, (_, dtype) in zip(made, shapes, strict=True)
    ]
    decode(rows, packets, into)
    refused = [i for i, bad in enumerate(made[2].tolist()) if bad]
    if refused:
        raise InvalidArgument(
            f"invalid packets: got invalid content in {refused}, expected compact packets of "
            f"arrays with {sorted({int(row[4]) for row in rows})} elements"
        )
    return made[0], made[1]


def decode(rows: Any, packets: ArrayRef, into: Sequence[ArrayRef]) -> None:
    """Reads packets into indices [n], values [n] and refused [packets]; see decode_batch."""
    module, table = devices.module(packets.device), inputs.Table(rows)
    scratch = _Scratch(module.compact_decoding_bytes(table.address), packets)
    module.decode_compact(
        table.address,
        *(one.pointer for one in into),
        scratch.address,
        *devices.queue(packets.device, packets.array),
    )


class _Scratch:
    """A workspace of a call; none on the CPU. Must live until the core returns."""

    def __init__(self, nbytes: int, like: ArrayRef) -> None:
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
