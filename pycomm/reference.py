"""Reference implementation of every kernel of `pycomm.kernels` in NumPy, for reading and testing.

The functions return new arrays and change no argument. Their results equal those of the kernels
bit for bit, on every device; they are not optimized. bfloat16, which NumPy does not have, is stored
in float32 arrays.

Arithmetic is in float32, or in float64 if the arrays are float64. Every operation rounds to
nearest, ties to even. A computed NaN is always the quiet NaN 0x7fc00000.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "cast",
    "clip",
    "clip_scale",
    "decode_sum",
    "decode_update",
    "dgc_rollback",
    "dgc_step",
    "encode",
    "fma",
    "magnitude",
    "momentum_mask",
    "norm",
    "reduce",
    "scatter_add",
    "threshold",
    "topk",
    "unpack",
]

Array = Any  # of NumPy, of a float dtype unless stated otherwise
Packet = tuple[Array, Array]  # indices int32 [k], ascending, and values [k]


class Step(NamedTuple):
    """The result of a DGC step: the new u and v, and the selected elements."""

    u: Array
    v: Array
    indices: Array
    values: Array
    u_values: Array  # u at the indices, before masking


# ---- the DGC step (arXiv 1712.01887) -------------------------------------------------------------


def dgc_step(  # noqa: PLR0913 - all but the first four by name
    grad: Array,
    u: Array,
    v: Array,
    k: int,
    *,
    momentum: float,
    weight: Array = None,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    masking: bool = True,
    scale: Any = 1.0,
    found_inf: float = 0.0,
) -> Step:
    """One step for arrays of one shape; `scale` is a number, or an array with one for each element.

    Several arrays that share one k are concatenated first.
    """
    real = u.dtype.type
    if found_inf != 0:
        nothing = np.zeros(k, real)
        return Step(u.copy(), v.copy(), np.arange(k, dtype=np.int32), nothing, nothing.copy())
    m, decay = real(momentum), real(weight_decay)
    with np.errstate(all="ignore"):
        x = np.asarray(scale).astype(real) * grad.astype(real)
        if decay != 0:
            x = fma(decay, weight.astype(real), x)
        if nesterov:
            u = m * (u + x)
            v = v + (u + x)
        else:
            u = fma(m, u, x)
            v = v + u
    u, v = _one_nan(u), _one_nan(v)
    indices, values = topk(v, k)
    u_values = u.reshape(-1)[indices]
    masked = indices if masking else indices[~np.isfinite(values)]
    return Step(_zeroed(u, masked), _zeroed(v, indices), indices, values, u_values)


def dgc_rollback(
    u: Array, v: Array, indices: Array, values: Array, u_values: Array, *, found_inf: float = 0.0
) -> tuple[Array, Array]:
    """(u, v) before the step selected elements."""
    u, v = u.copy(), v.copy()
    if found_inf == 0:
        u.reshape(-1)[indices] = u_values
        v.reshape(-1)[indices] = values
    return u, v


def momentum_mask(u: Array, v: Array, indices: Array) -> tuple[Array, Array]:
    """(u, v) with zeros at the indices."""
    return _zeroed(u, indices), _zeroed(v, indices)


# ---- selection -----------------------------------------------------------------------------------


def topk(x: Array, k: int) -> Packet:
    """The k largest magnitudes, ties to the lower index; indices are ascending."""
    flat = x.reshape(-1)
    best = np.argsort(~magnitude(flat), kind="stable")[:k]  # ~: the largest first, ties in order
    indices = np.sort(best).astype(np.int32)
    return indices, flat[indices]


def threshold(x: Array, k: int) -> Array:
    """The k-th largest magnitude, array [1] of the dtype of x."""
    return np.sort(magnitude(x.reshape(-1)))[[-k]].view(x.dtype)


def magnitude(x: Array) -> Array:
    """The bits without the sign, as unsigned integers: NaN is above infinity, which is above all
    numbers."""
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return x.view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)


# ---- packets -------------------------------------------------------------------------------------


def scatter_add(out: Array, indices: Array, values: Array, scale: float = 1.0) -> Array:
    """out + scale * value at each index."""
    real = _real(out)
    flat = out.reshape(-1).copy()
    with np.errstate(all="ignore"):
        added = flat[indices].astype(real) + real(scale) * values.astype(real)
        flat[indices] = _one_nan(added).astype(out.dtype)
    return flat.reshape(out.shape)


def decode_sum(out: Array, packets: Sequence[Packet], scale: float = 1.0) -> Array:
    """An array like `out`: scale * the sum of the values at each index, 0 where there is no
    value."""
    there, sums = _sums(out, packets)
    with np.errstate(all="ignore"):
        scaled = _one_nan(_real(out)(scale) * sums).astype(out.dtype)
    return np.where(there, scaled, out.dtype.type(0)).reshape(out.shape)


def decode_update(param: Array, packets: Sequence[Packet], lr: float, scale: float = 1.0) -> Array:
    """fma(-lr, scale * sum, param) where a packet has a value: one step of SGD."""
    real = _real(param)
    there, sums = _sums(param, packets)
    flat = param.reshape(-1)
    with np.errstate(all="ignore"):
        after = fma(-real(lr), real(scale) * sums, flat.astype(real)).astype(param.dtype)
    return np.where(there, _one_nan(after), flat).reshape(param.shape)


def _sums(out: Array, packets: Sequence[Packet]) -> tuple[Array, Array]:
    """(whether a packet has the element, the sum): the first value, to which others are added in
    order."""
    there = np.zeros(out.size, bool)
    sums = np.zeros(out.size, _real(out))
    for indices, values in packets:
        with np.errstate(all="ignore"):
            own = values.astype(sums.dtype)
            sums[indices] = np.where(there[indices], sums[indices] + own, own)
        there[indices] = True
    return there, sums


DTYPE_CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}


def encode(
    indices: Array, values: Array, count: int, value_dtype: str = "float32", residual: Array = None
) -> tuple[bytes, Array]:
    """(the packet, the residual plus the rounding errors at the indices)."""
    sent = cast(values, value_dtype)
    if residual is not None:
        residual = residual.copy()
        with np.errstate(all="ignore"):
            lost = values - sent.astype(values.dtype)
            residual.reshape(-1)[indices] = _one_nan(residual.reshape(-1)[indices] + lost)
    if value_dtype == "bfloat16":  # the upper half of a float32
        sent = (sent.view(np.uint32) >> 16).astype(np.uint16)
    head = struct.pack("<8sQQBB6x", b"PYCOMMPK", len(indices), count, DTYPE_CODES[value_dtype], 0)
    body = sent.tobytes()
    return head + body + bytes(-len(body) % 4) + indices.astype("<i4").tobytes(), residual


def unpack(packet: bytes) -> Packet:
    """The indices and values of an encoded packet."""
    _, k, _, code, _ = struct.unpack_from("<8sQQBB6x", packet)
    name = {code: name for name, code in DTYPE_CODES.items()}[code]
    stored = np.dtype("uint16" if name == "bfloat16" else name)
    values = np.frombuffer(packet, stored, k, 32)
    if name == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(packet, np.int32, k, len(packet) - 4 * k), values


# ---- dense ---------------------------------------------------------------------------------------

TILE, LANES = 4096, 128


def norm(x: Array) -> Array:
    """sqrt of the sum of squares, float64 [1], in the kernels' order of additions."""
    exact = x.dtype != np.float64  # then the square is a float64 too
    square = (lambda x, lane: x * x + lane) if exact else (lambda x, lane: fma(x, x, lane))
    sums = _tile_sums(x.reshape(-1).astype(np.float64), square)
    while sums.size > 1:
        sums = _tile_sums(sums, lambda x, lane: lane + x)
    return _one_nan(np.sqrt(sums if sums.size else np.zeros(1)))


def _tile_sums(x: Array, add: Callable[[Array, Array], Array]) -> Array:
    """One sum per tile: 128 lanes from left to right, then the lanes in pairs."""
    padded = np.pad(x, (0, -x.size % TILE)).reshape(-1, TILE // LANES, LANES)
    lanes = np.zeros((len(padded), LANES))
    with np.errstate(all="ignore"):
        for row in range(TILE // LANES):
            lanes = add(padded[:, row], lanes)
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def clip_scale(norms: Array, limit: float, scale: float = 1.0, *, dtype: str = "float32") -> Array:
    """scale * min(1, limit / norm); a norm that is 0 or not finite does not clip."""
    with np.errstate(all="ignore"):
        ratios = np.where((norms > 0) & np.isfinite(norms), limit / norms, 1)
        return (scale * np.minimum(ratios, 1)).astype(dtype)


def clip(x: Array, limit: float) -> Array:
    """x * min(1, limit / |x|)."""
    real = _real(x)
    factor = clip_scale(norm(x), limit, dtype=real.__name__)[0]
    if factor == 1:
        return x.copy()
    with np.errstate(all="ignore"):
        return _one_nan((x.astype(real) * factor).astype(x.dtype))


def cast(x: Array, dtype: str) -> Array:
    """x rounded once; bfloat16 is returned in float32."""
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            return _one_nan(_round_bfloat16(x))
        return _one_nan(x.astype(dtype))


def reduce(xs: Sequence[Array], op: str = "sum") -> Array:
    """xs[0] (+) xs[1] (+) ..., left to right; float16 is added in float32 and rounded once.

    bool: sum is or, product is and. Integers wrap around. min and max return NaN if there is one,
        and
    -0 is less than +0.
    """
    dtype = xs[0].dtype
    if dtype.kind == "b":
        op = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(op, op)
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    total = xs[0].astype(wide)
    with np.errstate(all="ignore"):
        for x in xs[1:]:
            total = OPS[op](total, x.astype(wide))
        if op == "avg":
            total = total / wide.type(len(xs))
        return _one_nan(total.astype(dtype)) if dtype.kind == "f" else total


def _least(a: Array, b: Array) -> Array:
    if a.dtype.kind != "f":
        return np.minimum(a, b)
    return np.where(a == b, np.where(np.signbit(a), a, b), np.minimum(a, b))


OPS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": _least,
    "max": lambda a, b: -_least(-a, -b) if a.dtype.kind == "f" else np.maximum(a, b),
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}

# ---- arithmetic ----------------------------------------------------------------------------------


def fma(a: Any, b: Any, c: Any) -> Array:
    """a * b + c of float32 or float64, rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    return _one_nan(_fma64(a, b, c) if a.dtype == np.float64 else _fma32(a, b, c))


def _fma32(a: Array, b: Array, c: Array) -> Array:
    """In float64 the product is exact, and TwoSum gives the exact error of the sum. The sum is
    rounded
    to odd: towards zero, with the last bit set if it is inexact. With 53 bits for 24 the second
    rounding, to float32, then gives the correctly rounded result (Boldo and Melquiond, Emulation of
    FMA and correctly rounded sums, IEEE Trans. Comput. 57(4), 2008).
    """
    with np.errstate(all="ignore"):
        product, addend = a.astype(np.float64) * b, c.astype(np.float64)
        total = product + addend
        back = total - product
        lost = (product - (total - back)) + (addend - back)
        away = np.signbit(lost) != np.signbit(
            total
        )  # the sum is farther from zero than the exact value
        odd = (total.view(np.uint64) - away.astype(np.uint64)) | np.uint64(1)
        exact = (lost == 0) | ~np.isfinite(total)
        return np.where(exact, total, odd.view(np.float64)).astype(np.float32)


def _fma64(a: Array, b: Array, c: Array) -> Array:
    """Uses rational numbers, one element at a time; Python rounds a quotient of integers once."""
    with np.errstate(all="ignore"):
        plain = a * b + c
    result = plain.copy()
    rational = np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & (a != 0) & (b != 0)
    for i in zip(*np.nonzero(rational), strict=True):
        truth = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if truth != 0:  # else the product is exactly -c, and the zero's sign is right
            try:
                result[i] = float(truth)
            except OverflowError:  # beyond the largest float64
                result[i] = np.inf if truth > 0 else -np.inf
    return result


def _round_bfloat16(x: Array) -> Array:
    """To nearest, ties to even, 8 bits, as float32; float64 is first rounded to odd in float32."""
    near = x.astype(np.float32)
    if x.dtype == np.float64:
        away = np.abs(near) > np.abs(x)
        odd = ((near.view(np.uint32) - away.astype(np.uint32)) | np.uint32(1)).view(np.float32)
        near = np.where((near == x) | np.isnan(x), near, odd)
    bits = near.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(near), near, rounded.view(np.float32))


def _real(x: Array) -> Any:
    """The dtype of arithmetic with elements of x."""
    return np.float64 if x.dtype == np.float64 else np.float32


def _one_nan(x: Array) -> Array:
    return np.where(np.isnan(x), np.array(np.nan, x.dtype), x)


def _zeroed(x: Array, indices: Array) -> Array:
    x = x.copy()
    x.reshape(-1)[indices] = 0
    return x
