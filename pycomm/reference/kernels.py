"""The definition of the kernels: see the package for their conventions."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

Array = Any  # a NumPy array, of a float dtype unless stated otherwise
Packet = tuple[Array, Array]  # indices int32 [k], ascending, and values [k]


class Step(NamedTuple):
    """The result of a DGC step.

    Attributes:
        u: velocity after the step, of the shape and dtype of the argument.
        v: accumulated unsent velocity after the step, as u.
        indices: int32 [k], ascending: the selected elements.
        values: [k], v at the indices before it was cleared.
        u_values: [k], u at the indices before masking.
    """

    u: Array
    v: Array
    indices: Array
    values: Array
    u_values: Array


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
    """One step of deep gradient compression (Lin et al., arXiv 1712.01887).

    To select one k from several arrays, concatenate them first.

    Args:
        grad: gradients, any float dtype and shape.
        u: velocity, float32 or float64, of the same shape.
        v: accumulated unsent velocity, as u.
        k: number of elements to select, 0..count.
        momentum: the momentum factor.
        weight: parameters, of the same shape; not used if `weight_decay` is 0.
        weight_decay: the factor of L2 weight decay.
        nesterov: Nesterov momentum.
        masking: momentum factor masking.
        scale: factor of the gradient: a number, or an array with one factor for each element.
        found_inf: if not 0, u and v stay and the result is indices 0..k-1 and values 0.

    Returns:
        The new u and v, and the selected elements.
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
    """(u, v) before the selection of a step.

    Args:
        u, v: after the step, float32 or float64.
        indices, values, u_values: of the step's result: int32 [k], [k] and [k].
        found_inf: the argument of the step; if not 0, the result is a copy of u and v.
    """
    u, v = u.copy(), v.copy()
    if found_inf == 0:
        u.reshape(-1)[indices] = u_values
        v.reshape(-1)[indices] = values
    return u, v


def momentum_mask(u: Array, v: Array, indices: Array) -> tuple[Array, Array]:
    """(u, v) with zeros at the indices (int32 [k]): momentum factor masking."""
    return _zeroed(u, indices), _zeroed(v, indices)


# ---- selection -----------------------------------------------------------------------------------


def topk(x: Array, k: int) -> Packet:
    """(indices int32 [k] ascending, values [k]) of the k largest magnitudes of x.

    Args:
        x: any float dtype and shape; indices count in C order.
        k: 0..count. Among equal magnitudes the lower index is selected.
    """
    flat = x.reshape(-1)
    best = np.argsort(~magnitude(flat), kind="stable")[:k]  # ~: the largest first, ties in order
    indices = np.sort(best).astype(np.int32)
    return indices, flat[indices]


def threshold(x: Array, k: int) -> Array:
    """The k-th largest magnitude of x, k in 1..count: array [1] of the dtype of x."""
    return np.sort(magnitude(x.reshape(-1)))[[-k]].view(x.dtype)


def magnitude(x: Array) -> Array:
    """The bits of x without the sign, as unsigned integers of the shape and item size of x.

    Their order is the order of magnitudes, with NaN above infinity above all numbers.
    """
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return x.view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)


# ---- packets -------------------------------------------------------------------------------------


def scatter_add(out: Array, indices: Array, values: Array, scale: float = 1.0) -> Array:
    """A copy of `out` with scale * value added at each index.

    Args:
        out: any float dtype and shape.
        indices: int32 [k], ascending, in 0..count-1.
        values: [k], any float dtype.
        scale: a factor, rounded to float32 unless `out` is float64.
    """
    real = _real(out)
    flat = out.reshape(-1).copy()
    with np.errstate(all="ignore"):
        added = flat[indices].astype(real) + real(scale) * values.astype(real)
        flat[indices] = _one_nan(added).astype(out.dtype)
    return flat.reshape(out.shape)


def decode_sum(out: Array, packets: Sequence[Packet], scale: float = 1.0) -> Array:
    """scale * the sum of the packets' values at each index, 0 at all other elements.

    Args:
        out: gives the shape and dtype of the result.
        packets: pairs (indices int32 [k], values [k]), added in their order.
        scale: a factor of the sum.
    """
    there, sums = _sums(out, packets)
    with np.errstate(all="ignore"):
        scaled = _one_nan(_real(out)(scale) * sums).astype(out.dtype)
    return np.where(there, scaled, out.dtype.type(0)).reshape(out.shape)


def decode_update(param: Array, packets: Sequence[Packet], lr: float, scale: float = 1.0) -> Array:
    """fma(-lr, scale * sum, param) where a packet has an element: one step of SGD.

    Args:
        param: any float dtype and shape.
        packets: pairs (indices int32 [k], values [k]), added in their order.
        lr: the learning rate.
        scale: a factor of the sum.

    Returns:
        An array of the shape and dtype of `param`.
    """
    real = _real(param)
    there, sums = _sums(param, packets)
    flat = param.reshape(-1)
    with np.errstate(all="ignore"):
        after = fma(-real(lr), real(scale) * sums, flat.astype(real)).astype(param.dtype)
    return np.where(there, _one_nan(after), flat).reshape(param.shape)


def _sums(out: Array, packets: Sequence[Packet]) -> tuple[Array, Array]:
    """(whether a packet has the element, the sum of the values in the order of packets)."""
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
    """A raw packet.

    Args:
        indices: int32 [k], ascending, in 0..count-1.
        values: [k], float32 or float64.
        count: number of elements of the array that the indices refer to.
        value_dtype: "float16", "bfloat16", "float32" or "float64".
        residual: [count], of the dtype of values, or None.

    Returns:
        (the packet, a copy of the residual with the rounding error added at the indices).

    Raises:
        KeyError: an unknown value_dtype.
    """
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
    """(indices int32 [k], values [k]) of a raw packet; bfloat16 values are returned as float32."""
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
    """The Euclidean norm of x, any float dtype and shape: float64 [1].

    The order of additions is fixed and the same as in the kernels.
    """
    exact = x.dtype != np.float64  # then float64 represents the square exactly
    square = (lambda x, lane: x * x + lane) if exact else (lambda x, lane: fma(x, x, lane))
    sums = _tile_sums(x.reshape(-1).astype(np.float64), square)
    while sums.size > 1:
        sums = _tile_sums(sums, lambda x, lane: lane + x)
    return _one_nan(np.sqrt(sums if sums.size else np.zeros(1)))


def _tile_sums(x: Array, add: Callable[[Array, Array], Array]) -> Array:
    """One sum for each tile: 128 lanes from left to right, then the lanes in pairs."""
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
    """scale * min(1, limit / norm) for each norm; a norm that is 0 or not finite does not clip.

    Args:
        norms: float64 [n].
        limit: the largest norm; at least 0.
        scale: a common factor.
        dtype: of the result, "float32" or "float64".

    Returns:
        [n], of `dtype`.
    """
    with np.errstate(all="ignore"):
        ratios = np.where((norms > 0) & np.isfinite(norms), limit / norms, 1)
        return (scale * np.minimum(ratios, 1)).astype(dtype)


def clip(x: Array, limit: float) -> Array:
    """x * min(1, limit / |x|), of the shape and dtype of x; limit: at least 0."""
    real = _real(x)
    factor = clip_scale(norm(x), limit, dtype=real.__name__)[0]
    if factor == 1:
        return x.copy()
    with np.errstate(all="ignore"):
        return _one_nan((x.astype(real) * factor).astype(x.dtype))


def cast(x: Array, dtype: str) -> Array:
    """x rounded once to "float16", "bfloat16", "float32" or "float64".

    The result has the shape of x. A bfloat16 result is a float32 array.
    """
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            return _one_nan(_round_bfloat16(x))
        return _one_nan(x.astype(dtype))


def reduce(xs: Sequence[Array], op: str = "sum") -> Array:
    """xs[0] (+) xs[1] (+) ..., left to right; float16 is added in float32 and rounded once.

    For bool, sum is or and product is and. Integers wrap around. A NaN propagates, and -0 is less
    than +0.

    Args:
        xs: at least one array, all of one shape and dtype.
        op: "sum", "avg", "product", "min", "max", "band", "bor" or "bxor".

    Returns:
        An array of the shape and dtype of xs[0].

    Raises:
        KeyError: an unknown op.
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
    """a * b + c, rounded once (fused multiply-add): float32 or float64 arrays, broadcast."""
    a, b, c = np.broadcast_arrays(a, b, c)
    return _one_nan(_fma64(a, b, c) if a.dtype == np.float64 else _fma32(a, b, c))


def _fma32(a: Array, b: Array, c: Array) -> Array:
    """In float64 the product is exact, and TwoSum gives the exact error of the sum. The sum is
    rounded to odd: towards zero, with the last bit set if it is inexact. With 53 bits for 24 the
    second rounding, to float32, gives the correctly rounded result (Boldo and Melquiond, Emulation
    of FMA and correctly rounded sums, IEEE Trans. Comput. 57(4), 2008)."""
    with np.errstate(all="ignore"):
        product, addend = a.astype(np.float64) * b, c.astype(np.float64)
        total = product + addend
        back = total - product
        lost = (product - (total - back)) + (addend - back)
        away = np.signbit(lost) != np.signbit(total)  # |sum| is above the exact value
        odd = (total.view(np.uint64) - away.astype(np.uint64)) | np.uint64(1)
        exact = (lost == 0) | ~np.isfinite(total)
        return np.where(exact, total, odd.view(np.float64)).astype(np.float32)


def _fma64(a: Array, b: Array, c: Array) -> Array:
    """With rational numbers, element by element; Python rounds a quotient of integers once."""
    with np.errstate(all="ignore"):
        plain = a * b + c
    result = plain.copy()
    rational = np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & (a != 0) & (b != 0)
    for i in zip(*np.nonzero(rational), strict=True):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if exact != 0:  # else the product is exactly -c, and the sign of zero is right
            try:
                result[i] = float(exact)
            except OverflowError:  # beyond the largest float64
                result[i] = np.inf if exact > 0 else -np.inf
    return result


def _round_bfloat16(x: Array) -> Array:
    """Rounds to 8 bits, nearest, ties to even, as float32; float64 first to float32, to odd."""
    near = x.astype(np.float32)
    if x.dtype == np.float64:
        away = np.abs(near) > np.abs(x)
        odd = ((near.view(np.uint32) - away.astype(np.uint32)) | np.uint32(1)).view(np.float32)
        near = np.where((near == x) | np.isnan(x), near, odd)
    bits = near.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(near), near, rounded.view(np.float32))


def _real(x: Array) -> Any:
    """The dtype of arithmetic on elements of x."""
    return np.float64 if x.dtype == np.float64 else np.float32


def _one_nan(x: Array) -> Array:
    return np.where(np.isnan(x), np.array(np.nan, x.dtype), x)


def _zeroed(x: Array, indices: Array) -> Array:
    x = x.copy()
    x.reshape(-1)[indices] = 0
    return x
