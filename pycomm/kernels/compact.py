"""Compact packets: fewer bytes for the same (index, value). The layout stands in
csrc/kernels/lean.h, the meaning in pycomm/reference_compact.py.

What a call was given has been validated by packets.py, which calls this file and no other does, but
for `codec_workspace`. How long a packet is and whether bytes are one are known on the device: the
functions here wait for it where the caller has no room for that answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pycomm import _core, arrays
from pycomm.arrays import ArrayRef, Like
from pycomm.errors import InvalidArgument
from pycomm.kernels import devices, inputs

CODECS = ("auto", "list", "bitmap", "rice")
VALUES = ("float32", "bfloat16", "int8", "2bit", "1bit", "3bit")
MOST_HEAD = 14  # bytes in front of the values


def most_bytes(k: int, count: int, value_dtype: str, codec: str) -> int:
    """The most that a packet takes.

    Raises:
        InvalidArgument: an unknown codec or value_dtype.
    """
    known_codec(codec)
    if value_dtype not in VALUES:
        raise InvalidArgument(
            f"value_dtype {value_dtype!r}: with codec={codec!r} one of {', '.join(VALUES)}"
        )
    return _core.most_compact_bytes(k, count, codec, value_dtype)


def known_codec(codec: str) -> None:
    """Raises InvalidArgument where there is no such codec."""
    if codec not in CODECS:
        raise InvalidArgument(f"codec {codec!r}: one of raw, {', '.join(CODECS)}")


def codec_workspace(x: Any, k: int, nbytes: int = 0) -> Any:
    """A new workspace for `encode` and `unpack` of compact packets of k elements on the device of
    x.

    Args:
        x: any array there.
        nbytes: of the packets to be unpacked.

    Returns:
        uint8 [what it takes]; nothing in host memory.
    """
    found = inputs.array(x, "x", _core.DTYPES)
    needed = devices.module(found.device).codec_workspace_bytes(int(k), int(nbytes))
    return arrays.new(found, (needed,), "uint8")


def encode(
    pair: list[ArrayRef], count: int, codes: tuple[str, str], residual: ArrayRef | None,
    out: ArrayRef, length: ArrayRef, workspace: Any,
) -> None:  # fmt: skip
    """Writes a packet into `out`, of most_bytes; into `length` how many bytes it took. `codes`: of
    the indices and of the values."""
    device, k = pair[1].device, pair[0].count
    module = devices.module(device)
    room = _Room(workspace, pair[1], module.codec_workspace_bytes(k, 0))
    module.encode_compact(
        pair[0].pointer,
        pair[1].pointer,
        k,
        count,
        pair[1].dtype,
        *codes,
        residual.pointer if residual is not None else 0,
        out.pointer,
        length.pointer,
        room.address,
        *devices.queue(device, out.array),
    )


def decode(packet: ArrayRef, count: int, into: tuple[Any, Any, Any], workspace: Any = None) -> None:
    """Reads a packet into (indices [k], values [k], refused [1]).

    Raises:
        InvalidArgument: in host memory, the bytes are no packet of k elements of `count`.
    """
    places, numbers, refused = (
        inputs.array(x, name, (dtype,), write=True)
        for x, name, dtype in zip(
            into, ("indices", "values", "refused"), ("int32", "float32", "int32"), strict=True
        )
    )
    if places.count != numbers.count or refused.count != 1:
        raise InvalidArgument(
            f"into: {places.count} indices, {numbers.count} values and {refused.count} refused; "
            "they are [k], [k] and [1]"
        )
    module = devices.module(packet.device)
    inputs.same_device([packet, places, numbers, refused], "unpack")
    inputs.require_no_overlap([places, numbers, refused], [packet], "unpack")
    needed = module.codec_workspace_bytes(places.count, packet.nbytes)
    room = _Room(workspace, packet, needed)
    module.decode_compact(
        packet.pointer,
        packet.nbytes,
        places.count,
        count,
        places.pointer,
        numbers.pointer,
        refused.pointer,
        room.address,
        *devices.queue(packet.device, packet.array),
    )


class _Room:
    """The caller's workspace, or a new one where there is none; the processor needs none. Keep it
    while the core works."""

    def __init__(self, workspace: Any, like: ArrayRef, nbytes: int) -> None:
        self.address = 0, 0
        if nbytes:
            self._found = inputs.workspace(workspace, like, nbytes)
            inputs.same_device([like, self._found], "workspace")
            self.address = self._found.pointer, self._found.nbytes


def decoded(packet: ArrayRef, k: int, count: int, like: Like) -> tuple[Any, Any]:
    """(indices int32 [k], values float32 [k]), new arrays of the kind of `like`.

    Raises:
        InvalidArgument: the bytes are no packet.
    """
    indices, values, refused = (
        arrays.new(like, (n,), dtype) for n, dtype in ((k, "int32"), (k, "float32"), (1, "int32"))
    )
    decode(packet, count, (indices, values, refused))
    if int(refused[0]):
        raise InvalidArgument(f"not a packet: its {packet.nbytes} bytes do not make sense")
    return indices, values


def header(packet: ArrayRef) -> tuple[int, int]:
    """(k, count) of a packet, wherever it lies; waits for a device.

    Raises:
        InvalidArgument: the bytes are no packet.
    """
    some = packet.array[:MOST_HEAD]
    head = np.array(some.tolist(), np.uint8)
    return _core.read_compact_header(head.ctypes.data, head.nbytes, packet.nbytes)
