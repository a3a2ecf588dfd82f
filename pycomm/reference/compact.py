"""The definition of compact packets in NumPy, to read and to compare with.

csrc/codec/compact.h defines the layout and the choice of parameters. `encode` writes the bytes of
`pycomm.kernels.encode`; `unpack` reads packets without validation.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np

from pycomm.reference.kernels import cast

Array = Any  # a NumPy array
INDEX_CODES = ("list", "bitmap", "rice")
VALUE_CODES = ("float32", "bfloat16", "2bit", "1bit", "3bit")
BLOCK, VALUE_BLOCK, LANES = 64, 4096, 128
REACH = 8 * 128  # eight octaves of bfloat16
MOST_PARAMETER = 30
MAGIC = b"PL\x01"
LARGEST = np.finfo(np.float32).max
LARGEST_LEVEL, NO_LEVEL = 0x7F7F, 0x7FC0  # bits of bfloat16: the largest finite one, NaN


def encode(
    indices: Array,
    values: Array,
    count: int,
    value_code: str = "float32",
    residual: Array = None,
    *,
    index_code: str = "auto",
) -> tuple[bytes, Array]:
    """A compact packet.

    Args:
        indices: int32 [k], ascending, in 0..count-1.
        values: [k], float32 or float64.
        count: number of elements of the array that the indices refer to.
        value_code: one of VALUE_CODES.
        residual: [count], of the dtype of values, or None.
        index_code: one of INDEX_CODES, or "auto": the shortest, the first among equals.

    Returns:
        (the packet, a copy of the residual with the rounding error added at the indices).

    Raises:
        ValueError: an unknown code.
    """
    packet, errors = encode_groups(indices, values, count, value_code, index_code=index_code)
    if residual is not None:
        residual = residual.copy()
        flat = residual.reshape(-1)
        with np.errstate(all="ignore"):
            flat[indices] = _one_nan(flat[indices] + errors)
    return packet, residual


def encode_groups(
    indices: Array,
    values: Array,
    count: int,
    value_code: str = "float32",
    group: int = 1,
    *,
    index_code: str = "auto",
) -> tuple[bytes, Array]:
    """A compact packet of groups of neighbours.

    Args:
        indices: int32 [k], ascending: groups, in 0..count-1.
        values: [k * group], float32 or float64.
        count: number of groups.
        value_code, index_code: as in `encode`.
        group: elements of a group.

    Returns:
        (the packet, value - encoded value).

    Raises:
        ValueError: an unknown code.
    """
    code, places = ("list", b"")
    if len(indices) < count:
        code, places = write_indices(indices, count, index_code)
    codes = INDEX_CODES.index(code) + 16 * VALUE_CODES.index(value_code)
    head = MAGIC + bytes([codes, group.bit_length() - 1]) + varint(len(indices)) + varint(count)
    body = write_values(values, value_code)
    with np.errstate(all="ignore"):
        errors = values - read_values(body, len(values), value_code).astype(values.dtype)
    return head + body + places, errors


def unpack(packet: bytes) -> tuple[Array, Array]:
    """(indices int32 [k], values float32 [k * group])."""
    codes, bits = struct.unpack_from("BB", packet, len(MAGIC))
    k, at = _read_varint(packet, len(MAGIC) + 2)
    count, at = _read_varint(packet, at)
    number, code = k << bits, VALUE_CODES[codes // 16]
    values = read_values(packet[at:], number, code)
    body = packet[at + len(write_values(np.zeros(number, np.float32), code)) :]
    index_code = INDEX_CODES[codes % 16]
    if k == count:
        return np.arange(k, dtype=np.int32), values
    if index_code == "list":
        return np.frombuffer(body, "<i4"), values
    if index_code == "bitmap":
        return np.flatnonzero(_bits(body)).astype(np.int32), values
    return _read_rice(body, k, count), values


# ---- indices -------------------------------------------------------------------------------------


def write_indices(indices: Array, count: int, code: str = "auto") -> tuple[str, bytes]:
    """The index code and the bytes; "auto": the shortest, the first among equals."""
    names = [name for name in INDEX_CODES if code in ("auto", name)]
    if code == "auto" and -(-count // 8) > 4 * len(indices):  # longer than the list
        names.remove("bitmap")
    written = {name: _WRITE[name](indices, count) for name in names}
    chosen = min(written, key=lambda name: len(written[name]))
    return chosen, written[chosen]


def parameters_of(gaps: Array) -> Array:
    """For each block of gaps the smallest b with sum((gap / 2^b + 1) / 2) <= size of the block."""
    starts = np.arange(0, len(gaps), BLOCK)
    sizes = np.diff(np.append(starts, len(gaps)))
    found = np.full(len(starts), MOST_PARAMETER)
    for b in range(MOST_PARAMETER, -1, -1):
        halves = np.add.reduceat(((gaps >> b) + 1) >> 1, starts)
        found[halves <= sizes] = b
    return found


def _list(indices: Array, count: int) -> bytes:
    del count
    return bytes(indices.astype("<i4").tobytes())


def _rice(indices: Array, count: int) -> bytes:
    if not len(indices):
        return b""
    gaps = np.diff(indices.astype(np.int64), prepend=-1) - 1
    parameters = parameters_of(gaps)
    steps = np.diff(parameters, prepend=_start(len(gaps), count))
    widths = np.repeat(parameters, BLOCK)[: len(gaps)]
    numbers = np.concatenate([np.where(steps > 0, 2 * steps - 1, -2 * steps), gaps >> widths])
    ends = np.cumsum(numbers + 1)
    unary = np.zeros(ends[-1], np.uint8)
    unary[ends - 1] = 1
    wide = (gaps[:, None] >> np.arange(MOST_PARAMETER)) & 1
    remainders = wide[np.arange(MOST_PARAMETER) < widths[:, None]]
    return _packed(unary) + _packed(remainders)


def _read_rice(body: bytes, k: int, count: int) -> Array:
    if k == 0:
        return np.zeros(0, np.int32)
    blocks = -(-k // BLOCK)
    bits = _bits(body)
    ones = np.flatnonzero(bits)
    numbers = np.diff(ones, prepend=-1) - 1
    steps = numbers[:blocks]
    signed = np.where(steps % 2, (steps + 1) // 2, -(steps // 2))
    parameters = _start(k, count) + np.cumsum(signed)
    widths = np.repeat(parameters, BLOCK)[:k]
    low = bits[8 * (len(body) - -(-int(widths.sum()) // 8)) :]
    starts = np.cumsum(widths) - widths
    places = np.arange(MOST_PARAMETER)
    taken = np.where(places < widths[:, None], starts[:, None] + places, 0)
    padded = low if len(low) else np.zeros(1, np.uint8)
    used = padded[taken].astype(np.int64) * (places < widths[:, None])
    remainders = (used << places).sum(axis=1)
    gaps = (numbers[blocks : blocks + k] << widths) + remainders
    return (np.cumsum(gaps + 1) - 1).astype(np.int32)


def _start(k: int, count: int) -> int:
    """floor(log2(ln 2 * count / k)), or 0."""
    return max(1, (count * 45426 // k) >> 16).bit_length() - 1


def _bitmap(indices: Array, count: int) -> bytes:
    bits = np.zeros(count, np.uint8)
    bits[indices] = 1
    return _packed(bits)


_WRITE = {"list": _list, "bitmap": _bitmap, "rice": _rice}

# ---- values --------------------------------------------------------------------------------------


def write_values(values: Array, code: str) -> bytes:
    """Encodes values [n] with one of VALUE_CODES."""
    with np.errstate(all="ignore"):
        x = cast(values, "float32")
    if code == "float32":
        return bytes(x.tobytes())
    if code == "bfloat16":
        return _half(cast(x, "bfloat16"))
    write = _BLOCKS[code][0]
    return b"".join(write(x[i : i + VALUE_BLOCK]) for i in range(0, len(x), VALUE_BLOCK))


def read_values(body: bytes, k: int, code: str) -> Array:
    """Decodes the first k values: float32 [k]."""
    if code == "float32":
        return np.frombuffer(body, "<f4", k)
    if code == "bfloat16":
        return _from_half(body, k)
    read = _BLOCKS[code][1]
    found, at = [np.zeros(0, np.float32)], 0
    for first in range(0, k, VALUE_BLOCK):
        block, taken = read(body[at:], min(VALUE_BLOCK, k - first))
        found.append(block)
        at += taken
    with np.errstate(all="ignore"):
        return _one_nan(np.concatenate(found))


def levels_of(magnitudes: Array) -> tuple[float, float, float]:
    """(low, high, limit): the means of the magnitudes up to the limit and above it. The first limit
    is the mean of all; two iterations set it to the middle of the levels (Lloyd, IEEE Trans. Inf.
    Theory 28(2), 1982)."""
    limit = _sum(magnitudes) / len(magnitudes)
    for remaining in (2, 1, 0):
        above = magnitudes > limit
        low = _sum(np.where(above, 0, magnitudes)) / np.count_nonzero(~above)
        high = _sum(np.where(above, magnitudes, 0)) / above.sum() if above.any() else low
        if remaining:
            limit = (low + high) / 2
    return low, high, limit


def _write_two_bit(x: Array) -> bytes:
    levels, high = [np.nan, np.nan], np.zeros(len(x), bool)
    if np.isfinite(x).all():
        magnitudes = np.abs(x).astype(np.float64)
        *levels, limit = levels_of(magnitudes)
        high = magnitudes > limit
    return _levels(levels) + _packed(np.stack([np.signbit(x), high], axis=1).reshape(-1))


def _write_one_bit(x: Array) -> bytes:
    level = np.nan
    if np.isfinite(x).all():
        level = _sum(np.abs(x).astype(np.float64)) / len(x)
    return _levels([level]) + _packed(np.signbit(x))


def write_grid(x: Array, bits: int) -> bytes:
    """One block: the sign, and the number of one of 2^(bits - 1) equal steps of the exponent."""
    low, step = NO_LEVEL, 0
    numbers = np.zeros(len(x), np.uint32)
    if np.isfinite(x).all():
        halves = (np.abs(x).view(np.uint32) >> 16).astype(np.int64)  # bfloat16, rounded down
        low = max(halves.min(), halves.max() - REACH)
        step = (halves.max() - low) // (1 << (bits - 1)) + 1
        numbers = np.maximum(halves - low, 0) // step
    columns = [np.signbit(x), *(numbers >> place & 1 for place in range(bits - 1))]
    return struct.pack("<HH", low, step) + _packed(np.stack(columns, axis=1).reshape(-1))


def _read_two_bit(body: bytes, n: int) -> tuple[Array, int]:
    taken = 4 + -(-n // 4)
    bits = _bits(body[4:taken])[: 2 * n].reshape(n, 2)
    return np.where(bits[:, 0], np.float32(-1), np.float32(1)) * _from_half(body, 2)[
        bits[:, 1]
    ], taken


def _read_one_bit(body: bytes, n: int) -> tuple[Array, int]:
    taken = 2 + -(-n // 8)
    signs = _bits(body[2:taken])[:n]
    return np.where(signs, np.float32(-1), np.float32(1)) * _from_half(body, 1)[0], taken


def read_grid(body: bytes, n: int, bits: int) -> tuple[Array, int]:
    """(the n values of a block of write_grid, its bytes)."""
    low, step = struct.unpack_from("<HH", body)
    taken = 4 + -(-bits * n // 8)
    columns = _bits(body[4:taken])[: bits * n].reshape(n, bits).astype(np.uint32)
    halves = low + (columns[:, 1:] << np.arange(bits - 1)).sum(axis=1) * step + step // 2
    halves = np.minimum(halves, LARGEST_LEVEL) if low <= LARGEST_LEVEL else halves * 0 + NO_LEVEL
    magnitudes = (halves.astype(np.uint32) << 16).view(np.float32)
    return np.where(columns[:, 0], -magnitudes, magnitudes), taken


_BLOCKS: dict[str, tuple[Any, Any]] = {
    "2bit": (_write_two_bit, _read_two_bit),
    "1bit": (_write_one_bit, _read_one_bit),
    "3bit": (functools.partial(write_grid, bits=3), functools.partial(read_grid, bits=3)),
}


def _sum(x: Array) -> Any:
    """Sums in 128 lanes from left to right, then adds the lanes pairwise."""
    lanes = np.zeros(LANES)
    for row in np.pad(x, (0, -len(x) % LANES)).reshape(-1, LANES):
        lanes = lanes + row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


def _levels(levels: Any) -> bytes:
    """Levels as bfloat16; a finite level is never rounded to infinity."""
    with np.errstate(all="ignore"):
        rounded = cast(np.asarray(levels, np.float64).astype(np.float32), "bfloat16")
    return _half(np.where(np.isinf(rounded), LARGEST, rounded))


def _half(x: Array) -> bytes:
    """The upper 16 bits of float32 values."""
    return bytes((x.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes())


def _from_half(body: bytes, n: int) -> Array:
    return (np.frombuffer(body, "<u2", n).astype(np.uint32) << 16).view(np.float32)


# ---- bits and numbers ----------------------------------------------------------------------------


def _packed(bits: Array) -> bytes:
    return bytes(np.packbits(bits.astype(bool), bitorder="little").tobytes())


def _bits(body: bytes) -> Array:
    return np.unpackbits(np.frombuffer(body, np.uint8), bitorder="little")


def varint(number: int) -> bytes:
    """7 bits in each byte, lowest first; the top bit is set if another byte follows."""
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _read_varint(packet: bytes, at: int) -> tuple[int, int]:
    """(the number, the offset after it)."""
    number = shift = 0
    while True:
        number |= (packet[at] & 0x7F) << shift
        shift += 7
        at += 1
        if packet[at - 1] < 0x80:
            return number, at


def _one_nan(x: Array) -> Array:
    return np.where(np.isnan(x), np.array(np.nan, x.dtype), x)
