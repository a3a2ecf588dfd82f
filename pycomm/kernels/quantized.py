"""Quantized arrays: 1 to 8 bits for each value. csrc/kernels/quantize.h defines the layout,
pycomm/reference/quantized.py the meaning.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pycomm import _core
from pycomm._arguments import flag, integer, number, refuse
from pycomm._core_api import arrays, devices
from pycomm._core_api.arrays import ArrayRef
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.kernels import inputs

BITS = (1, 2, 3, 4, 8)
BLOCK = 4096  # elements that share levels
FLOATS = ("float32", "float16", "bfloat16")


class Blocks:
    """Parts of a flat array that are quantized, in the order of the packet.

    Args:
        offsets: index of the first element of each block.
        counts: number of elements of each block, 1 to 4096. Blocks do not overlap.

    Attributes:
        end: the index after the last element of all blocks.

    Raises:
        InvalidArgument: the blocks overlap, or a number is out of range.
    """

    __slots__ = ("_table", "end")

    def __init__(self, offsets: Any, counts: Any) -> None:
        words = np.stack([np.asarray(offsets, np.int64), np.asarray(counts, np.int64)], axis=1)
        ascending = words[np.argsort(words[:, 0])]
        ends = ascending.sum(1)
        if len(words) and (
            ascending[0, 0] < 0
            or ends[-1] > inputs.MOST_ELEMENTS
            or words[:, 1].min() < 1
            or words[:, 1].max() > BLOCK
            or (ends[:-1] > ascending[1:, 0]).any()
        ):
            raise InvalidArgument(
                f"invalid blocks: expected at most {BLOCK} elements each that do not overlap, "
                f"between 0 and {inputs.MOST_ELEMENTS}"
            )
        self.end = int(ends[-1]) if len(words) else 0
        self._table = inputs.Table(words.astype(np.uint64))

    @classmethod
    def of(cls, count: int) -> Blocks:
        """The consecutive blocks of an array of `count` elements."""
        offsets = np.arange(0, count, BLOCK)
        return cls(offsets, np.minimum(count - offsets, BLOCK))

    @classmethod
    def packed(cls, counts: Any) -> Blocks:
        """Blocks of these lengths without elements between them."""
        return cls(np.cumsum(counts) - counts, counts)

    @property
    def address(self) -> tuple[int, int]:
        """The table for the core."""
        return self._table.address

    def nbytes(self, bits: int) -> int:
        """Bytes of a packet of these blocks."""
        return _core.quantized_bytes(self.address, check_bits(bits))


def check_bits(bits: int, name: str = "bits") -> int:
    """The number of bits; raises InvalidArgument for another than 1, 2, 3, 4 and 8."""
    if isinstance(bits, bool) or (found := integer(name, bits)) not in BITS:
        refuse(name, bits, "1, 2, 3, 4 or 8")
    return found


def quantized_bytes(count: int, bits: int) -> int:
    """Bytes of a packet of `quantize`.

    Args:
        count: number of elements.
        bits: 1, 2, 3, 4 or 8.

    Raises:
        InvalidArgument: an argument is out of range.
    """
    return Blocks.of(integer("count", count, 0, inputs.MOST_ELEMENTS)).nbytes(bits)


def quantize(x: Any, bits: int, residual: Any = None, out: Any = None) -> Any:
    """Encodes x + residual with `bits` per value, and updates the residual: error feedback.

    4096 consecutive values share levels. 1, 2 and 3 bits are the codes of compact packets. 4 bits
    are a sign and one of eight even steps of the exponent, over at most eight octaves. 8 bits are
    even steps of the largest magnitude / 127, rounded to nearest even. If a value is not finite,
    all that share its levels decode to NaN, and their residual stays as it was.

    Args:
        x: float32, float16 or bfloat16, of any shape.
        bits: 1, 2, 3, 4 or 8.
        residual: float32 [count], added to x in float32; then x + residual - decoded. None: 0.
        out: buffer for the packet, uint8 [quantized_bytes(count, bits)].

    Returns:
        The packet, uint8 [bytes].

    Raises:
        InvalidArgument: wrong dtype, layout, buffer or number of bits; nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    return encode(x, bits, residual, out)


def encode(
    x: Any,
    bits: int,
    residual: Any = None,
    out: Any = None,
    *,
    lost: Any = None,
    blocks: Blocks | None = None,
) -> Any:
    """As `quantize`, of the `blocks` of the flat x. With `lost`, float32 [count], the new residual
    is written there, and the residual stays as it was."""
    found = inputs.array(x, "x", FLOATS)
    cut = _blocks(blocks, found)
    out, packet = inputs.output(out, "out", found, cut.nbytes(bits), "uint8")
    written, read, before, after = [packet], [found], 0, 0
    if residual is not None:
        old = inputs.array(residual, "residual", ("float32",), write=True, count=found.count)
        before = after = old.pointer
        (written if lost is None else read).append(old)
        if lost is not None:
            new = inputs.array(lost, "lost", ("float32",), write=True, count=found.count)
            after = new.pointer
            written.append(new)
    inputs.check_memory("quantize", written, read)
    devices.module(found.device).quantize(
        (found.pointer, found.count),
        found.dtype,
        cut.address,
        bits,
        before,
        after,
        packet.pointer,
        *devices.queue(found.device, found.array),
    )
    return out


def dequantize(
    packet: Any, bits: int, out: Any, *, accumulate: bool = False, scale: float = 1.0
) -> Any:
    """out = scale * decoded values, or out + scale * decoded values, in float32. Returns `out`.

    Args:
        packet: uint8 [quantized_bytes(count, bits)], of `quantize`. Any bytes are valid.
        bits: 1, 2, 3, 4 or 8.
        out: float32, float16 or bfloat16, of any shape.
        accumulate: add to `out`.
        scale: factor of the values, rounded to float32.

    Raises:
        InvalidArgument: wrong dtype, layout, size or number of bits; nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    found = inputs.array(out, "out", FLOATS, write=True)
    how = flag("accumulate", accumulate), scale
    _decode(packet, bits, found, how, Blocks.of(found.count), None)
    return out


def decode(
    packet: Any,
    bits: int,
    out: Any,
    *,
    accumulate: bool = False,
    scale: float = 1.0,
    blocks: Blocks | None = None,
    check: bool = True,
) -> bool:
    """As `dequantize`, of the `blocks` of the flat `out`. Returns whether all values that were
    encoded were finite, for which it waits for the device; without `check`, True."""
    found = inputs.array(out, "out", FLOATS, write=True)
    if not check:
        _decode(packet, bits, found, (bool(accumulate), scale), _blocks(blocks, found), None)
        return True
    not_finite = arrays.new(found, (1,), "int32", zeros=True)
    flag = inputs.array(not_finite, "not_finite", ("int32",), write=True)
    _decode(packet, bits, found, (bool(accumulate), scale), _blocks(blocks, found), flag)
    return not int(not_finite[0])


def _decode(
    packet: Any, bits: int, out: ArrayRef, how: tuple[bool, float], blocks: Blocks,
    not_finite: ArrayRef | None,
) -> None:  # fmt: skip
    """`how`: accumulate and scale. `not_finite`: int32 [1], which a block that is not finite sets
    to 1."""
    source = inputs.array(packet, "packet", ("uint8",), count=blocks.nbytes(bits))
    inputs.check_memory("dequantize", [out], [source])
    accumulate, scale = how
    devices.module(out.device).dequantize(
        source.pointer,
        blocks.address,
        bits,
        number("scale", scale),
        accumulate,
        0 if not_finite is None else not_finite.pointer,
        (out.pointer, out.count),
        out.dtype,
        *devices.queue(out.device, out.array),
    )


def _blocks(given: Blocks | None, x: ArrayRef) -> Blocks:
    """The blocks of a call, which must be parts of `x`."""
    if given is None:
        return Blocks.of(x.count)
    if given.end > x.count:
        raise InvalidArgument(f"invalid blocks: got end {given.end}, x has {x.count} elements")
    return given


def check_array(x: ArrayRef, name: str) -> None:
    """Raises InvalidArgument or Unsupported unless the call `name` can exchange x quantized."""
    if x.device.kind != "cpu" and not arrays.is_torch(x.array):
        raise Unsupported(
            f"{name}: got an array on {x.device} that is no torch tensor: pass torch.as_tensor(x)"
        )
    if x.dtype not in FLOATS:
        raise InvalidArgument(f"{name}: got dtype {x.dtype}, expected {' or '.join(FLOATS)}")
