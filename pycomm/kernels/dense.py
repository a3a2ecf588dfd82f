"""Kernels over whole arrays: norms, clipping, casts, reductions. csrc/kernels/device_kernels.h has
the formulas. Called by users, as pycomm.kernels, and by the training layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycomm import _core, arrays
from pycomm.errors import InvalidArgument
from pycomm.kernels import devices, inputs
from pycomm.kernels.rows import Rows


def norm(x: Any, *, out: Any = None, workspace: Any = None) -> Any:
    """The Euclidean norm in float64, with the same bits on every device: array [1].

    A list of arrays of one dtype gives one norm each. `norm(norm(list))` is the norm of all of
    them together.

    Args:
        x: array of any float dtype and shape, or a list.
        out: buffer for the result, float64 [1] or [arrays].
        workspace: uint8 of `norm_workspace`.

    Raises:
        InvalidArgument, Unsupported: before anything changes.
    """
    rows = _several(x)
    module = devices.module(rows.device)
    table = inputs.Table(rows.words)
    out, result = inputs.output(out, "out", rows, len(rows), "float64")
    room = inputs.workspace(workspace, rows, module.norm_workspace_bytes(table.address))
    read = rows.spans("x")
    inputs.same_device([*read, result, room], "norm")
    inputs.require_no_overlap([result, room], read, "norm")
    module.norm(
        table.address,
        rows.dtype,
        result.pointer,
        (room.pointer, room.nbytes),
        *devices.queue(rows.device, rows.array),
    )
    return out


def norm_workspace(x: Any) -> Any:
    """A new workspace for `norm` of arrays of the counts of x (an array or a list); uint8."""
    rows = _several(x)
    table = inputs.Table(rows.words)
    nbytes = devices.module(rows.device).norm_workspace_bytes(table.address)
    return arrays.new(rows, (nbytes,), "uint8")


def clip_scale(
    norms: Any, limit: float, scale: float = 1.0, *, dtype: str = "float32", out: Any = None
) -> Any:
    """scale * min(1, limit / norm) for each norm: factors for `dgc_step`, made on the device.

    A norm that is 0, infinite or NaN does not clip: one NaN must not poison a whole array.

    Args:
        norms: float64 [n], as `norm` gives them.
        limit: at least 0.
        scale: a factor of all, as one over the loss scale.
        dtype: of the factors, that of u and v.
        out: buffer for the result, [n].

    Raises:
        InvalidArgument, Unsupported: before anything changes.
    """
    found = inputs.array(norms, "norms", ("float64",))
    limit = _limit(limit)
    if dtype not in ("float32", "float64"):
        raise InvalidArgument(f"factors are float32 or float64, not {dtype}")
    out, factors = inputs.output(out, "out", found, found.count, dtype)
    inputs.same_device([found, factors], "clip_scale")
    inputs.require_no_overlap([factors], [found], "clip_scale")
    devices.module(found.device).clip_scale(
        found.pointer,
        (factors.pointer, factors.count),
        dtype,
        limit,
        inputs.finite(scale, "scale"),
        *devices.queue(found.device, found.array),
    )
    return out


def clip_(x: Any, limit: float) -> Any:
    """x = x * min(1, limit / |x|), in place, as `clip_scale` says. Returns x.

    Args:
        x: any float dtype and shape.
        limit: at least 0.

    Raises:
        InvalidArgument, Unsupported: before anything changes.
    """
    found = inputs.array(x, "x", inputs.FLOATS, write=True)
    limit = _limit(limit)
    dtype = "float64" if found.dtype == "float64" else "float32"
    factor = arrays.as_array_ref(clip_scale(norm(x), limit, dtype=dtype), "factor")
    devices.module(found.device).multiply(
        (found.pointer, found.count),
        found.dtype,
        factor.pointer,
        *devices.queue(found.device, found.array),
    )
    return x


def cast(x: Any, dtype: Any, *, out: Any = None) -> Any:
    """x in another float dtype, rounded once to nearest, ties to even; NaN becomes the quiet NaN.

    Args:
        x: any float dtype and shape.
        dtype: "float16", "bfloat16", "float32" or "float64", or what torch or NumPy calls it.
        out: buffer of the result, of the shape of x.

    Raises:
        InvalidArgument, Unsupported: before anything changes.
    """
    found = inputs.array(x, "x", inputs.FLOATS)
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if name not in inputs.FLOATS:
        name = getattr(dtype, "__name__", name)  # np.float32 is a class
    if name not in inputs.FLOATS:
        raise InvalidArgument(f"cast to {dtype}: one of {', '.join(inputs.FLOATS)}")
    if out is None:
        out = arrays.new(found, found.shape, name)
    result = inputs.array(out, "out", (name,), write=True)
    inputs.same_shape(found, result, ("x", "out"))
    inputs.same_device([found, result], "cast")
    inputs.require_no_overlap([result], [found], "cast")
    devices.module(found.device).cast(
        (found.pointer, found.count),
        found.dtype,
        result.pointer,
        name,
        *devices.queue(found.device, found.array),
    )
    return out


def reduce_(out: Any, xs: Sequence[Any], op: str = "sum") -> Any:
    """out[i] = xs[0][i] (+) xs[1][i] (+) ..., left to right, in place. Returns `out`.

    16-bit floats are added in float32 and rounded once. `out` may be one of `xs`.

    Args:
        out: any dtype that travels, any shape.
        xs: at least one array, of the shape and dtype of `out`.
        op: "sum", "avg", "product", "min", "max", "band", "bor" or "bxor".

    Raises:
        InvalidArgument, Unsupported: before anything changes.
    """
    result = inputs.array(out, "out", _core.DTYPES, write=True)
    found = [inputs.array(x, f"xs[{i}]", (result.dtype,)) for i, x in enumerate(xs)]
    if not found:
        raise InvalidArgument("reduce_: xs is empty")
    if op not in _core.REDUCE_OPS:
        raise InvalidArgument(f"reduce_: op {op!r}; one of: {', '.join(_core.REDUCE_OPS)}")
    for i, x in enumerate(found):
        inputs.same_shape(result, x, ("out", f"xs[{i}]"))
    others = [x for x in found if x.pointer != result.pointer]
    inputs.same_device([result, *found], "reduce_")
    inputs.require_no_overlap([result], others, "reduce_")
    table = inputs.Table([(x.pointer,) for x in found])
    devices.module(result.device).reduce(
        (result.pointer, result.count),
        result.dtype,
        table.address,
        op,
        *devices.queue(result.device, result.array),
    )
    return out


def _several(x: Any) -> Rows:
    """An array, or a list of them."""
    listed = list(x) if isinstance(x, list | tuple) else [x]
    if not listed:
        raise InvalidArgument("norm: the list is empty")
    return Rows.of({"x": listed}, {"x": inputs.FLOATS}, "norm")


def _limit(limit: Any) -> float:
    number = inputs.finite(limit, "limit")
    if number < 0:
        raise InvalidArgument(f"limit = {number}: a norm is never negative")
    return number
