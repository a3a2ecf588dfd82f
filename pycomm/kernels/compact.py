"""Compact packets: fewer bytes for the same (index, value) pairs. csrc/codec/compact.h defines the
layout, pycomm/reference/compact.py the meaning.

packets.py validates arguments, except those of `codec_workspace`. The length and the validity of a
packet are known on the device. The functions here wait for the device unless the caller passes a
buffer for that result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pycomm import _core
from pycomm._arguments import integer, one_of, refuse
from pycomm._core_api import arrays, devices
from pycomm._core_api.arrays import ArrayRef, Like
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
    return _core.most_compact_bytes(k, count, codec, value_dtype)


def known_codec(codec: str) -> None:
    """Raises InvalidArgument for an unknown codec."""
    one_of("codec", codec, CODECS)


def codec_workspace(x: Any, k: int, nbytes: int = 0) -> Any:
    """A new workspace for `encode` and `unpack` of compact packets on the device of x.

    One workspace can be used for every packet of at most k elements and `nbytes` bytes, by one call
    at a time. Its content is not kept between calls.

    Args:
        x: any array on the device.
        k: number of elements of a packet.
        nbytes: bytes of a packet to unpack; 0 if the workspace is for `encode` only.

    Returns:
        uint8 [n]; n is 0 in host memory.

    Raises:
        InvalidArgument: x is not contiguous or its dtype is unknown, or a number is out of range.
        Unsupported: x is another kind of array, or the CUDA kernels are not built.
    """
    found = inputs.array(x, "x", _core.DTYPES)
    k = integer("k", k, 0, inputs.MOST_ELEMENTS)
    nbytes = integer("nbytes", nbytes, 0, MOST_PACKET)
    needed = devices.module(found.device).compact_workspace_bytes(k, nbytes)
    return arrays.new(found, (needed,), "uint8")


def encode(
    pair: list[ArrayRef], count: int, codes: tuple[str, str], residual: ArrayRef | None,
    out: ArrayRef, length: ArrayRef, workspace: Any,
) -> None:  # fmt: skip
    """Writes a packet into `out`, which has most_bytes, and its bytes into `length`. `codes`: codec
    of the indices and dtype of the values."""
    device, k = pair[1].device, pair[0].count
    module = devices.module(device)
    scratch = _Scratch(workspace, pair[1], module.compact_workspace_bytes(k, 0))
    module.encode_compact(
        pair[0].pointer,
        pair[1].pointer,
        k,
        count,
        pair[1].dtype,
        codes[0] == "auto",
        codes[0] if codes[0] != "auto" else "list",
        codes[1],
        residual.pointer if residual is not None else 0,
        out.pointer,
        length.pointer,
        scratch.address,
        *devices.queue(device, out.array),
    )


def decode(packet: ArrayRef, count: int, into: tuple[Any, Any, Any], workspace: Any = None) -> None:
    """Reads a packet into (indices [k], values [k], refused [1]).

    Raises:
        InvalidArgument: wrong buffers; in host memory also bytes that are not a packet of k
            elements of `count`.
    """
    if not isinstance(into, (list, tuple)) or len(into) != 3:
        refuse("into", into, "(indices, values, refused)")
    places, numbers, refused = (
        inputs.array(x, name, (dtype,), write=True)
        for x, name, dtype in zip(
            into, ("indices", "values", "refused"), ("int32", "float32", "int32"), strict=True
        )
    )
    if places.count != numbers.count or refused.count != 1:
        raise InvalidArgument(
            f"invalid into: got {places.count} indices, {numbers.count} values and "
            f"{refused.count} refused, expected [k], [k] and [1]"
        )
    inputs.check_memory("unpack", [places, numbers, refused], [packet])
    lengths = [packet.nbytes], [places.count]
    _decode(packet, lengths, count, (places, numbers, refused), workspace)


def decode_batch(
    packets: ArrayRef, lengths: tuple[Sequence[int], Sequence[int]], count: int
) -> tuple[Any, Any]:
    """(indices int32 [n], values float32 [n]) of concatenated packets, in one set of launches.

    Waits for the device once. `lengths`: bytes and number of elements of each packet, at least one.

    Raises:
        InvalidArgument: the bytes are not such packets of arrays of `count` elements.
    """
    sizes, kept = lengths
    shapes = (sum(kept), "int32"), (sum(kept), "float32"), (len(sizes), "int32")
    made = [arrays.new(packets, (n,), dtype) for n, dtype in shapes]
    into = [
        inputs.array(x, "out", (dtype,), write=True)
        for x, (_, dtype) in zip(made, shapes, strict=True)
    ]
    _decode(packets, lengths, count, into, None)
    refused = [i for i, bad in enumerate(made[2].tolist()) if bad]
    if refused:
        raise InvalidArgument(
            f"invalid packets: got invalid content in {refused}, expected compact packets of an "
            f"array of {count} elements"
        )
    return made[0], made[1]


def _decode(
    packets: ArrayRef, lengths: tuple[Sequence[int], Sequence[int]], count: int,
    into: Sequence[ArrayRef], workspace: Any,
) -> None:  # fmt: skip
    """Reads concatenated packets into (indices, values, refused)."""
    module = devices.module(packets.device)
    sizes, kept = (np.array(numbers, np.uint64) for numbers in lengths)
    begin = np.uint64(packets.pointer) + np.cumsum(sizes) - sizes
    rows = np.stack([begin, sizes, kept], axis=1)
    needed = sum(map(module.compact_workspace_bytes, lengths[1], lengths[0]))
    scratch = _Scratch(workspace, packets, needed)
    module.decode_compact(
        (rows.ctypes.data, len(rows)),
        count,
        *(one.pointer for one in into),
        scratch.address,
        *devices.queue(packets.device, packets.array),
    )


class _Scratch:
    """The caller's workspace or a new one; the CPU needs none. Must live until the core returns."""

    def __init__(self, workspace: Any, like: ArrayRef, nbytes: int) -> None:
        self.address = 0, 0
        if nbytes:
            self._found = inputs.workspace(workspace, like, nbytes)
            inputs.same_device("workspace", like, self._found)
            self.address = self._found.pointer, self._found.nbytes


def decoded(packet: ArrayRef, k: int, count: int, like: Like) -> tuple[Any, Any]:
    """(indices int32 [k], values float32 [k]), new arrays of the kind of `like`.

    Raises:
        InvalidArgument: the bytes are not a packet.
    """
    indices, values, refused = (
        arrays.new(like, (n,), dtype) for n, dtype in ((k, "int32"), (k, "float32"), (1, "int32"))
    )
    decode(packet, count, (indices, values, refused))
    if int(refused[0]):
        raise InvalidArgument(f"invalid packet: {packet.nbytes} bytes with invalid content")
    return indices, values


def header(packet: ArrayRef) -> tuple[int, int]:
    """(k, count) of a packet on any device; waits for the device.

    Raises:
        InvalidArgument: the bytes are not a packet.
    """
    some = packet.array[:MOST_HEAD]
    head = np.array(some.tolist(), np.uint8)
    return _core.read_compact_header(head.ctypes.data, head.nbytes, packet.nbytes)
