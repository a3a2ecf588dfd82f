"""The definition of quantized arrays in NumPy; csrc/kernels/quantize.h defines the layout."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from pycomm.reference import compact
from pycomm.reference.kernels import cast

Array = Any  # a NumPy array
MOST_STEPS = 127
MOST_STEP = np.float32(float.fromhex("0x1.020406p+121"))  # MOST_STEPS of them are finite


def quantize(x: Array, bits: int, residual: Array = None) -> tuple[bytes, Array]:
    """x, plus a residual, in few bits.

    Args:
        x: [count], float16 or float32.
        bits: 1, 2, 3, 4 or 8 for each value.
        residual: float32 [count]; None: 0.

    Returns:
        (the packet, float32 [count]: what was lost). Where 4096 values are not all finite, the
        residual stays as it was.
    """
    with np.errstate(all="ignore"):
        t = cast(x, "float32")
        if residual is not None:
            t = cast(t + residual, "float32")
    packet, lost = b"", []
    for first in range(0, len(t), compact.VALUE_BLOCK):
        block = t[first : first + compact.VALUE_BLOCK]
        coded = _write(block, bits)
        packet += coded
        if np.isfinite(block).all():
            lost.append(block - dequantize(coded, len(block), bits))
        else:
            kept = np.zeros_like(t) if residual is None else residual
            lost.append(kept[first : first + len(block)])
    return packet, np.concatenate([np.zeros(0, np.float32), *lost])


def dequantize(packet: bytes, count: int, bits: int) -> Array:
    """The values of a packet, float32 [count]."""
    found, at = [np.zeros(0, np.float32)], 0
    for first in range(0, count, compact.VALUE_BLOCK):
        block, taken = _read(packet[at:], min(compact.VALUE_BLOCK, count - first), bits)
        found.append(block)
        at += taken
    return cast(np.concatenate(found), "float32")


def _write(x: Array, bits: int) -> bytes:
    """One block."""
    if bits == 8:
        return _write_steps(x)
    return compact.write_grid(x, 4) if bits == 4 else compact.write_values(x, f"{bits}bit")


def _read(body: bytes, n: int, bits: int) -> tuple[Array, int]:
    """(the n values of a block, its bytes)."""
    if bits in (3, 4):
        return compact.read_grid(body, n, bits)
    if bits == 8:
        (step,) = struct.unpack_from("<f", body)
        with np.errstate(all="ignore"):
            return np.frombuffer(body, np.int8, n, 4).astype(np.float32) * np.float32(step), 4 + n
    values = compact.read_values(body, n, f"{bits}bit")
    return values, (2 if bits == 1 else 4) + -(-bits * n // 8)


def _write_steps(x: Array) -> bytes:
    """Equal steps up to the largest magnitude."""
    step, numbers = np.float32(np.nan), np.zeros(len(x), np.int8)
    if np.isfinite(x).all():
        step = np.minimum(np.abs(x).max() / np.float32(MOST_STEPS), MOST_STEP)
        if step > 0:
            numbers = np.clip(np.rint(x / step), -MOST_STEPS, MOST_STEPS).astype(np.int8)
    return struct.pack("<f", step) + numbers.tobytes()
