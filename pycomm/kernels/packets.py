"""Packets: what ranks send each other, and how it becomes a sum or an update. The formulas stand in
csrc/kernels/device_kernels.h, the layout of bytes in csrc/kernels/packet.h.

A packet is a pair (indices int32 [k] ascending, values [k]) or a uint8 array that `encode` wrote,
raw or compact. Called by users, as pycomm.kernels, and by the training layer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycomm import _core, arrays
from pycomm.arrays import ArrayRef
from pycomm.errors import InvalidArgument
from pycomm.kernels import compact, devices, inputs
from pycomm.kernels.batch import PacketBatch, elements_of, rows_of
from pycomm.kernels.rows import Rows

HEADER_BYTES = 32
VALUE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def scatter_add(out: Any, indices: Any, values: Any, scale: float = 1.0) -> Any:
    """out[i] = out[i] + scale * value for each (index, value), in place. Returns `out`.

    Args:
        out: float16, bfloat16, float32 or float64, any shape.
        indices: int32 [k], ascending, in 0..count-1.
        values: [k], any float dtype.
        scale: a factor, rounded to float32 unless `out` is float64.

    Raises:
        InvalidArgument, Unsupported: before anything changes.
    """
    found = inputs.array(out, "out", inputs.FLOATS, write=True)
    pair = _pair(indices, values)
    inputs.same_device([found, *pair], "scatter_add")
    inputs.require_no_overlap([found], pair, "scatter_add")
    devices.module(found.device).scatter_add(
        (found.pointer, found.count),
        found.dtype,
        pair[0].pointer,
        pair[1].pointer,
        pair[0].count,
        pair[1].dtype,
        inputs.finite(scale, "scale"),
        *devices.queue(found.device, found.array),
    )
    return out


def decode_sum(
    out: Any,
    packets: Sequence[Any] | PacketBatch,
    scale: float = 1.0,
    *,
    value_dtype: str = "float32",
) -> Any:
    """out[i] = scale * the sum of the packets' values at i, in their order; 0 elsewhere. In place.

    Args:
        out: float16, bfloat16, float32 or float64, any shape; all of it is written. Sums are made
            in float32, or float64 for float64. Or a list, through which the indices count.
        packets: of all ranks, in rank order: pairs, or encoded; also one uint8 array
            [ranks, bytes], or a PacketBatch.
        scale: as 1 / ranks for a mean.
        value_dtype: of raw packets; compact ones say it themselves, and have float32 values here.

    Returns:
        `out`.

    Raises:
        InvalidArgument, Unsupported: before anything changes.
    """
    chain = _Chain(out, "out")
    table, dtype = _table(chain, packets, value_dtype, "decode_sum")
    devices.module(chain.rows.device).decode_sum(
        chain.table.address,
        chain.rows.dtype,
        table.address,
        dtype,
        inputs.finite(scale, "scale"),
        *devices.queue(chain.rows.device, chain.rows.array),
    )
    return out


def decode_update(
    param: Any,
    packets: Sequence[Any] | PacketBatch,
    lr: float,
    scale: float = 1.0,
    *,
    value_dtype: str = "float32",
) -> Any:
    """param[i] = fma(-lr, scale * sum, param[i]) where a packet has i, in place: decode and SGD.

    Other elements are not touched, so this costs what the packets weigh. Arguments, result and
    errors as of `decode_sum`.
    """
    chain = _Chain(param, "param")
    table, dtype = _table(chain, packets, value_dtype, "decode_update")
    devices.module(chain.rows.device).decode_update(
        chain.table.address,
        chain.rows.dtype,
        table.address,
        dtype,
        inputs.finite(lr, "lr"),
        inputs.finite(scale, "scale"),
        *devices.queue(chain.rows.device, chain.rows.array),
    )
    return param


def encode(
    indices: Any,
    values: Any,
    count: int,
    value_dtype: str = "float32",
    residual: Any = None,
    *,
    codec: str = "raw",
    out: Any = None,
    length: Any = None,
    workspace: Any = None,
) -> Any:
    """A packet as bytes that can travel.

    Args:
        indices: int32 [k], ascending, in 0..count-1.
        values: [k], float32 or float64.
        count: of the array that they were chosen from.
        value_dtype: of the values on the way, rounded to nearest: any float; in compact packets
            float32, bfloat16, "int8" (256 share a scale), "3bit" (a sign and one of four levels in
            even steps of the exponent; 4096 share them), "2bit" (a sign and one of two levels; 4096
            share them) or "1bit" (a sign; 4096 share a level). Where one is not finite, all that
            share something with it become NaN.
        residual: [count] of the dtype of the values: what rounding lost is added there, in place.
        codec: "raw" has a length that k and value_dtype tell, and is read where it lies, on any
            device. Compact packets are as long as their indices need: "list", "bitmap", "rice", or
            "auto", that of fewest bytes.
        out: a buffer for the result: uint8 [packet_bytes(...)].
        length: int64 [1], becomes how many bytes a compact packet took; on a GPU 0 where the
            indices do not ascend in the range. With it nothing waits for the GPU.
        workspace: uint8, of `codec_workspace`.

    Returns:
        uint8 [packet_bytes(k, value_dtype)]; of a compact packet, the part of the buffer that it
        took, or with `length` all of the buffer.

    Raises:
        InvalidArgument, Unsupported: before anything changes.
    """
    pair = _pair(indices, values)
    k = inputs.how_many(pair[0].count, count)
    if pair[1].dtype not in ("float32", "float64"):
        raise InvalidArgument(f"values are {pair[1].dtype}; encode takes float32 or float64")
    nbytes = packet_bytes(k, value_dtype, codec=codec, count=count)
    out, packet = inputs.output(out, "out", pair[1], nbytes, "uint8")
    written, rest = [packet], None
    if residual is not None:
        rest = inputs.array(residual, "residual", (pair[1].dtype,), write=True)
        if rest.count != count:
            raise InvalidArgument(f"residual has {rest.count} elements; count is {count}")
        written.append(rest)
    inputs.same_device([*pair, *written], "encode")
    inputs.require_no_overlap(written, pair, "encode")
    if codec != "raw":
        taken, size = inputs.output(length, "length", pair[1], 1, "int64")
        inputs.same_device([packet, size], "encode")
        compact.encode(pair, int(count), (codec, value_dtype), rest, packet, size, workspace)
        return out if length is not None else out[: _length(taken, int(count))]
    _aligned(packet, value_dtype)
    devices.module(packet.device).encode(
        pair[0].pointer,
        pair[1].pointer,
        k,
        int(count),
        pair[1].dtype,
        value_dtype,
        rest.pointer if rest is not None else 0,
        packet.pointer,
        *devices.queue(packet.device, packet.array),
    )
    return out


def unpack(
    packet: Any,
    *,
    value_dtype: str = "float32",
    codec: str = "raw",
    count: int | None = None,
    into: tuple[Any, Any, Any] | None = None,
    workspace: Any = None,
) -> tuple[Any, Any]:
    """(indices int32 [k], values [k]) of an encoded packet.

    Of a raw packet these are views of its memory, nothing is copied; of a compact one new arrays,
    with float32 values. On the host the header says all, and is checked. On a GPU the caller says
    whether the packet is raw: then nobody waits, and the length and `value_dtype` say k. A compact
    one is waited for twice, for its header and for whether it is sound, but not with `into`.

    Args:
        packet: uint8 array, or bytes.
        codec: on a GPU, "raw", or any other for a compact packet.
        count, into: of the array that a compact packet is of, and buffers (indices int32 [k],
            values float32 [k], refused int32 [1]). On a GPU `refused` becomes 0; or 1 where the
            bytes are no packet of k of `count`: then all indices are -1 and all values 0.
        workspace: uint8, of `codec_workspace`; with `into`.

    Raises:
        InvalidArgument: the bytes are no packet.
    """
    found = inputs.array(packet, "packet", ("uint8",))
    if into is not None:
        if count is None:
            raise InvalidArgument("unpack: into goes with count, that of the packet's array")
        compact.decode(found, inputs.how_many(count, inputs.MOST_ELEMENTS), into, workspace)
        return into[0], into[1]
    if found.device.kind == "cpu":
        k, of, value_dtype, codec = _core.read_packet_header(found.pointer, found.nbytes)
        if codec != "raw":
            return compact.decoded(found, k, of, found)
    elif codec != "raw":
        compact.known_codec(codec)
        return compact.decoded(found, *compact.header(found), found)
    else:
        k = _k_of(found.nbytes, value_dtype)
    array = arrays.plain(packet) if found.device.kind == "cpu" else packet
    indices = array[_indices_offset(k, value_dtype) :]
    values = array[HEADER_BYTES : HEADER_BYTES + k * VALUE_BYTES[value_dtype]]
    return _as(indices, "int32"), _as(values, value_dtype)


def packet_bytes(
    k: int, value_dtype: str = "float32", *, codec: str = "raw", count: int = inputs.MOST_ELEMENTS
) -> int:
    """Bytes of a raw packet of k elements; the most that a compact one takes, of k of `count`.

    Raises:
        InvalidArgument: no such codec, or no such dtype in its packets.
    """
    if codec != "raw":
        return compact.most_bytes(k, int(count), value_dtype, codec)
    return _indices_offset(k, value_dtype) + 4 * k


def _length(length: Any, count: int) -> int:
    """What an encoder has said on the device, which is waited for."""
    found = int(length[0])
    if found == 0:
        raise InvalidArgument(f"encode: indices ascend and lie in 0..{count - 1}; these do not")
    return found


def _indices_offset(k: int, value_dtype: str) -> int:
    if value_dtype not in VALUE_BYTES:
        raise InvalidArgument(
            f"value_dtype {value_dtype!r}: one of {', '.join(VALUE_BYTES)} with codec='raw'"
        )
    return int(HEADER_BYTES + -(-k * VALUE_BYTES[value_dtype] // 4) * 4)


def _k_of(nbytes: int, value_dtype: str) -> int:
    k = (nbytes - HEADER_BYTES) // (4 + VALUE_BYTES[value_dtype])
    if k < 0 or packet_bytes(k, value_dtype) != nbytes:
        raise InvalidArgument(f"{nbytes} bytes are no raw packet with {value_dtype} values")
    return k


def _as(x: Any, dtype: str) -> Any:
    """A uint8 array's bytes as elements of another dtype."""
    if isinstance(x, np.ndarray):
        return x.view(dtype)
    torch = sys.modules.get("torch")
    known = getattr(torch, dtype) if torch and isinstance(x, torch.Tensor) else dtype
    return x.view(known)


def _aligned(packet: ArrayRef, value_dtype: str) -> None:
    if packet.pointer % max(4, VALUE_BYTES[value_dtype]):
        raise InvalidArgument("the packet is not aligned to its values: pass one that is no slice")


def _pair(indices: Any, values: Any) -> list[ArrayRef]:
    where = inputs.array(indices, "indices", ("int32",))
    what = inputs.array(values, "values", inputs.FLOATS)
    if where.count != what.count:
        raise InvalidArgument(f"{where.count} indices and {what.count} values")
    return [where, what]


class _Chain:
    """Arrays of one dtype, laid end to end."""

    def __init__(self, x: Any, name: str) -> None:
        several = list(x) if isinstance(x, list | tuple) else [x]
        if not several:
            raise InvalidArgument(f"{name}: the list is empty")
        self.rows = Rows.of({name: several}, {name: inputs.FLOATS}, name, write=(name,))
        self.spans = self.rows.spans(name)
        self.count = int(self.rows.counts.sum())
        if self.count > inputs.MOST_ELEMENTS:
            raise InvalidArgument(
                f"{name} has {self.count} elements together, and an int32 index counts at most "
                f"{inputs.MOST_ELEMENTS}"
            )
        self.table = inputs.Table(self.rows.words)


def _table(
    out: _Chain, packets: Sequence[Any] | PacketBatch, value_dtype: str, name: str
) -> tuple[inputs.Table, str]:
    """The core's Packets, and the dtype of their values."""
    rows: Any
    if isinstance(packets, PacketBatch):
        read = elements_of(packets)
        rows, dtypes = rows_of(packets, read), [read[1].dtype]
    else:
        rows, read, dtypes = _located(out, packets, value_dtype)
    if len(set(dtypes)) > 1:
        raise InvalidArgument(f"{name}: values are {' and '.join(sorted(set(dtypes)))}: one dtype")
    inputs.same_device([*out.spans, *read], name)
    inputs.require_no_overlap(out.spans, read, name)
    return inputs.Table(rows, read), dtypes[0] if dtypes else value_dtype


def _located(
    out: _Chain, packets: Sequence[Any], value_dtype: str
) -> tuple[list[tuple[int, int, int]], list[ArrayRef], list[str]]:
    """Of each packet: indices, values and elements; what keeps their memory; their dtype."""
    rows, read, dtypes = [], [], []
    for i, packet in enumerate(packets):
        if isinstance(packet, list | tuple):
            pair = _pair(*packet)
            read += pair
            dtypes.append(pair[1].dtype)
            rows.append((pair[0].pointer, pair[1].pointer, pair[0].count))
            continue
        found = inputs.array(packet, f"packets[{i}]", ("uint8",))
        k, dtype, codec = _of_encoded(found, out.count, value_dtype)
        if codec != "raw":
            pair = _pair(*compact.decoded(found, k, out.count, out.rows))
            read += pair
            dtypes.append(dtype)
            rows.append((pair[0].pointer, pair[1].pointer, k))
            continue
        read.append(found)
        dtypes.append(value_dtype)
        _aligned(found, value_dtype)
        offset = _indices_offset(k, value_dtype)
        rows.append((found.pointer + offset, found.pointer + HEADER_BYTES, k))
    return rows, read, dtypes


def _of_encoded(found: ArrayRef, count: int, value_dtype: str) -> tuple[int, str, str]:
    """(k, dtype of the decoded values, codec) of one encoded packet for an array of `count`; on the
    host its header must agree."""
    if found.device.kind != "cpu":
        return _k_of(found.nbytes, value_dtype), value_dtype, "raw"
    k, of, dtype, codec = _core.read_packet_header(found.pointer, found.nbytes)
    if of != count:
        raise InvalidArgument(f"a packet of an array of {of} elements for one of {count}")
    if codec != "raw":
        return k, "float32", codec
    if dtype != value_dtype:
        raise InvalidArgument(f"a packet has {dtype} values; value_dtype is {value_dtype}")
    return k, dtype, codec
