"""Sparse packets: encoding, decoding, and sums or updates from the packets of all ranks.

A packet is a pair (indices int32 [k] ascending, values [k]) or a uint8 array that `encode` wrote,
raw or compact. csrc/kernels/device_kernels.h has the formulas, csrc/codec/packet.h the layout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycomm import _core
from pycomm._arguments import integer, number, one_of, refuse
from pycomm._core_api import arrays, devices
from pycomm._core_api.arrays import ArrayRef
from pycomm.errors import InvalidArgument
from pycomm.kernels import compact, inputs
from pycomm.kernels.batch import (
    GroupBatch,
    PacketBatch,
    addresses_of,
    elements_of,
    group_rows_of,
)
from pycomm.kernels.rows import Rows

HEADER_BYTES = 32
OF_GROUPS: dict[str, Callable[..., None]] = {
    "decode_sum": _core.decode_group_sum,
    "decode_update": _core.decode_group_update,
}
VALUE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def scatter_add(out: Any, indices: Any, values: Any, scale: float = 1.0) -> Any:
    """out[i] = out[i] + scale * value for each (index, value), in place. Returns `out`.

    Args:
        out: float16, bfloat16, float32 or float64, any shape.
        indices: int32 [k], ascending, in 0..count-1.
        values: [k], any float dtype.
        scale: a factor, rounded to float32 unless `out` is float64.

    Raises:
        InvalidArgument: arrays or scale are invalid; in host memory also indices that do not
            ascend in 0..count-1. Nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    found = inputs.array(out, "out", inputs.FLOATS, write=True)
    pair = _pair(indices, values)
    inputs.check_memory("scatter_add", [found], pair)
    devices.module(found.device).scatter_add(
        (found.pointer, found.count),
        found.dtype,
        pair[0].pointer,
        pair[1].pointer,
        pair[0].count,
        pair[1].dtype,
        number("scale", scale),
        *devices.queue(found.device, found.array),
    )
    return out


def decode_sum(
    out: Any,
    packets: Sequence[Any] | PacketBatch | GroupBatch,
    scale: float = 1.0,
    *,
    value_dtype: str = "float32",
) -> Any:
    """out[i] = scale * the sum of the packets' values at i, in their order; 0 elsewhere. In place.

    Args:
        out: float16, bfloat16, float32 or float64, any shape; every element is written. Sums use
            float32, or float64 if `out` is float64. Or a list of arrays of one dtype: indices then
            count through all of them, concatenated.
        packets: of all ranks, in rank order: pairs, encoded packets, one uint8 array [ranks,
            bytes], a PacketBatch, or in host memory a GroupBatch. On a GPU encoded packets must be
            raw.
        scale: a factor of the sum, for example 1 / ranks for a mean.
        value_dtype: dtype of the values of encoded raw packets. Compact packets contain their
            dtype and are decoded to float32; pairs and batches use the dtype of their values.

    Returns:
        `out`.

    Raises:
        InvalidArgument: invalid arrays or packets, packets of an array of another size, or values
            of several dtypes. Nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    _decode("decode_sum", (out, "out"), packets, value_dtype, scale=scale)
    return out


def decode_update(
    param: Any,
    packets: Sequence[Any] | PacketBatch | GroupBatch,
    lr: float,
    scale: float = 1.0,
    *,
    value_dtype: str = "float32",
) -> Any:
    """param[i] = fma(-lr, scale * sum, param[i]) where a packet has i, in place: decode and SGD.

    Other elements are not read or written, so the cost depends on the packets only.

    Args:
        param: float16, bfloat16, float32 or float64, any shape, or a list of arrays of one dtype,
            as `out` of `decode_sum`.
        packets: of all ranks, in rank order, as in `decode_sum`.
        lr: the learning rate.
        scale: a factor of the sum, for example 1 / ranks for a mean.
        value_dtype: dtype of the values of encoded raw packets, as in `decode_sum`.

    Returns:
        `param`.

    Raises:
        InvalidArgument: as `decode_sum`, or `lr` is not a finite number. Nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    _decode("decode_update", (param, "param"), packets, value_dtype, lr=lr, scale=scale)
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
) -> Any:
    """Encodes indices and values as one packet of bytes.

    Args:
        indices: int32 [k], ascending, in 0..count-1.
        values: [k], float32 or float64.
        count: number of elements of the array that the indices refer to.
        value_dtype: dtype of the encoded values, rounded to nearest. Raw packets: "float16",
            "bfloat16", "float32" or "float64". Compact packets: "float32", "bfloat16", "3bit" (sign
            and one of four levels in even steps of the exponent), "2bit" (sign and one of two
            levels) or "1bit" (sign and one level); 4096 values share levels. A value that is not
            finite turns all values of its block into NaN.
        residual: [count], of the dtype of the values: the rounding error is added to it in place
            (error feedback).
        codec: "raw": the length follows from k and value_dtype, and the packet is read in place on
            any device. Compact codecs "list", "bitmap" and "rice" have a length that depends on the
            indices; "auto" takes the shortest of these three.
        out: a buffer for the result: uint8 [packet_bytes(...)] of the same arguments.

    Returns:
        uint8 [packet_bytes(k, value_dtype)] for a raw packet. For a compact packet the used part of
        the buffer; on a GPU the call waits for its length.

    Raises:
        InvalidArgument: invalid arrays, dtype or codec, or indices that do not ascend in the range.
            Nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    pair, count = _pair(indices, values), integer("count", count, 0, inputs.MOST_ELEMENTS)
    k = integer("number of indices", pair[0].count, 0, count)
    if pair[1].dtype not in ("float32", "float64"):
        raise InvalidArgument(
            f"invalid values: got dtype {pair[1].dtype}, expected float32 or float64"
        )
    nbytes = packet_bytes(k, value_dtype, codec=codec, count=count)
    out, packet = inputs.output(out, "out", pair[1], nbytes, "uint8")
    written, rest = [packet], None
    if residual is not None:
        rest = inputs.array(residual, "residual", (pair[1].dtype,), write=True)
        if rest.count != count:
            raise InvalidArgument(
                f"invalid residual: got {rest.count} elements, expected count={count}"
            )
        written.append(rest)
    inputs.check_memory("encode", written, pair)
    if codec != "raw":
        errors, lost = None, 0
        if rest is not None:
            errors, left = inputs.output(None, "errors", pair[1], k, pair[1].dtype)
            lost = left.pointer
        row = np.array([[pair[0].pointer, pair[1].pointer, k, 0, count, lost]], np.uint64)
        (made,) = compact.encode(row, (codec, value_dtype), pair[1], out=out)
        if errors is not None:
            decode_update(residual, [(indices, errors)], -1.0)
        return made
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


def unpack(packet: Any, *, value_dtype: str = "float32", codec: str = "raw") -> tuple[Any, Any]:
    """Decodes a packet that `encode` wrote.

    In host memory the header is read and validated. On a GPU the caller names the codec. There a
    raw packet needs no wait for the device: k follows from the length and `value_dtype`. A compact
    packet waits twice, for the header and for the validation.

    Args:
        packet: uint8 array, or bytes.
        value_dtype: on a GPU, dtype of the values of a raw packet: "float16", "bfloat16",
            "float32" or "float64". Ignored in host memory and for compact packets.
        codec: on a GPU, "raw", or any compact codec for a compact packet. Ignored in host memory.

    Returns:
        (indices int32 [k], values [k]). Views of the memory of a raw packet; new arrays, with
        float32 values, for a compact one.

    Raises:
        InvalidArgument: the bytes are not a packet.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    found = inputs.array(packet, "packet", ("uint8",))
    if found.device.kind == "cpu":
        k, of, value_dtype, codec = _core.read_packet_header(found.pointer, found.nbytes)
        if codec != "raw":
            return compact.decoded(found, k, of)
    elif codec != "raw":
        compact.known_codec(codec)
        return compact.decoded(found, *compact.header(found))
    else:
        k = _k_of(found.nbytes, value_dtype)
    array = arrays.plain(packet) if found.device.kind == "cpu" else packet
    indices = array[_indices_offset(k, value_dtype) :]
    values = array[HEADER_BYTES : HEADER_BYTES + k * VALUE_BYTES[value_dtype]]
    return _as(indices, "int32"), _as(values, value_dtype)


def packet_bytes(
    k: int, value_dtype: str = "float32", *, codec: str = "raw", count: int = inputs.MOST_ELEMENTS
) -> int:
    """Bytes of a raw packet of k elements, or the upper bound for a compact packet.

    Args:
        k: number of elements of the packet.
        value_dtype: dtype of the encoded values, as in `encode`.
        codec: "raw" or a compact codec, as in `encode`.
        count: number of elements of the array that the indices refer to; for compact packets.

    Returns:
        Bytes.

    Raises:
        InvalidArgument: an unknown codec, or a dtype that the codec does not support.
    """
    k = integer("k", k, 0, inputs.MOST_ELEMENTS)
    count = integer("count", count, 0, inputs.MOST_ELEMENTS)
    if one_of("codec", codec, ("raw", *compact.CODECS)) != "raw":
        return compact.most_bytes(k, count, value_dtype, codec)
    return _indices_offset(k, value_dtype) + 4 * k


def _indices_offset(k: int, value_dtype: str) -> int:
    one_of("value_dtype with codec='raw'", value_dtype, VALUE_BYTES)
    return int(HEADER_BYTES + -(-k * VALUE_BYTES[value_dtype] // 4) * 4)


def _k_of(nbytes: int, value_dtype: str) -> int:
    k = (nbytes - HEADER_BYTES) // (4 + VALUE_BYTES[value_dtype])
    if k < 0 or packet_bytes(k, value_dtype) != nbytes:
        raise InvalidArgument(f"not a raw packet with {value_dtype} values: {nbytes} bytes")
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
        raise InvalidArgument(
            f"invalid packet: got address {packet.pointer:#x}, which is not a multiple of the "
            f"size of its {value_dtype} values: do not pass a slice"
        )


def _pair(indices: Any, values: Any) -> list[ArrayRef]:
    where = inputs.array(indices, "indices", ("int32",))
    what = inputs.array(values, "values", inputs.FLOATS)
    if where.count != what.count:
        raise InvalidArgument(
            f"invalid packet: got {where.count} indices and {what.count} values, expected as many"
        )
    return [where, what]


class _Chain:
    """Arrays of one dtype, which indices count through. Each begins at a multiple of `group`."""

    def __init__(self, x: Any, name: str, group: int) -> None:
        several = list(x) if isinstance(x, list | tuple) else [x]
        if not several:
            raise InvalidArgument(f"invalid {name}: got an empty list, expected at least one array")
        self.rows = Rows.of({name: several}, {name: inputs.FLOATS}, name, write=(name,))
        self.spans = self.rows.spans(name)
        self.count = sum(-(-count // group) for count in self.rows.counts.tolist()) * group
        if self.count > inputs.MOST_ELEMENTS:
            raise InvalidArgument(
                f"{name} has {self.count} elements together, and an int32 index counts at most "
                f"{inputs.MOST_ELEMENTS}"
            )
        self.table = inputs.Table(self.rows.words)
        self.words = self.table.address, self.rows.dtype, group


def _decode(
    call: str,
    target: tuple[Any, str],
    packets: Sequence[Any] | PacketBatch | GroupBatch,
    value_dtype: str,
    **numbers: float,
) -> None:
    """Calls a kernel that adds packets to `target`, an array and its name, with the numbers."""
    one_of("value_dtype", value_dtype, VALUE_BYTES)
    group = packets.group if isinstance(packets, PacketBatch | GroupBatch) else 1
    chain = _Chain(*target, inputs.group_size(group))
    how = [number(name, value) for name, value in numbers.items()]
    if isinstance(packets, GroupBatch):
        rows, read = group_rows_of(packets)
        groups = chain.count // packets.group
        if sum(packets.counts) != groups:
            raise InvalidArgument(
                f"invalid packets: got packets of {sum(packets.counts)} groups, expected {groups}, "
                f"those of {target[1]}"
            )
        inputs.check_memory(call, chain.spans, read)
        table = inputs.Table(rows)
        OF_GROUPS[call](*chain.words, table.address, *how)
        return
    table, dtype = _table(chain, packets, value_dtype, call)
    queue = devices.queue(chain.rows.device, chain.rows.array)
    getattr(devices.module(chain.rows.device), call)(
        *chain.words, table.address, dtype, *how, *queue
    )


def _table(
    out: _Chain, packets: Sequence[Any] | PacketBatch, value_dtype: str, name: str
) -> tuple[inputs.Table, str]:
    """The core's table of packets, and the dtype of their values."""
    rows: Any
    if isinstance(packets, PacketBatch):
        read = elements_of(packets)
        lengths = np.array(packets.lengths, np.uint64)
        rows, dtypes = np.column_stack([*addresses_of(packets, read), lengths]), [read[1].dtype]
    else:
        rows, read, dtypes = _located(out, packets, value_dtype)
    if len(set(dtypes)) > 1:
        raise InvalidArgument(
            f"{name}: invalid packets: got values of {' and '.join(sorted(set(dtypes)))}, expected "
            "one dtype"
        )
    inputs.check_memory(name, out.spans, read)
    return inputs.Table(rows, read), dtypes[0] if dtypes else value_dtype


def _located(
    out: _Chain, packets: Sequence[Any], value_dtype: str
) -> tuple[list[tuple[int, int, int]], list[ArrayRef], list[str]]:
    """For each packet: addresses and length; then the owners of the memory, and the dtypes."""
    rows, read, dtypes = [], [], []
    if not isinstance(packets, list | tuple):
        stacked = arrays.plain(packets)
        if len(stacked.shape) != 2:
            refuse("packets", packets, "a list of packets, or a uint8 array [ranks, bytes]")
        packets = [stacked[i] for i in range(stacked.shape[0])]
    for i, packet in enumerate(packets):
        if isinstance(packet, list | tuple):
            if len(packet) != 2:
                refuse(f"packets[{i}]", packet, "(indices, values), or a uint8 array")
            pair = _pair(*packet)
            read += pair
            dtypes.append(pair[1].dtype)
            rows.append((pair[0].pointer, pair[1].pointer, pair[0].count))
            continue
        found = inputs.array(packet, f"packets[{i}]", ("uint8",))
        k, dtype, codec = _of_encoded(found, out.count, value_dtype)
        if codec != "raw":
            pair = _pair(*compact.decoded(found, k, out.count))
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
    """(k, dtype of the decoded values, codec) of an encoded packet for an array of `count`. In host
    memory its header is validated."""
    if found.device.kind != "cpu":
        return _k_of(found.nbytes, value_dtype), value_dtype, "raw"
    k, of, dtype, codec = _core.read_packet_header(found.pointer, found.nbytes)
    if of != count:
        raise InvalidArgument(
            f"invalid packet: got one of an array of {of} elements, expected {count}"
        )
    if codec != "raw":
        return k, "float32", codec
    if dtype != value_dtype:
        raise InvalidArgument(
            f"invalid packet: got {dtype} values, expected value_dtype={value_dtype!r}"
        )
    return k, dtype, codec
