"""Kernels over whole arrays: norms, clipping, casts, reductions. csrc/kernels/device_kernels.h has
the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pycomm import _core
from pycomm._arguments import number, one_of, refuse
from pycomm._core_api import arrays, devices
from pycomm.errors import InvalidArgument
from pycomm.kernels import inputs
from pycomm.kernels.rows import Rows


def norm(x: Any, *, out: Any = None, workspace: Any = None) -> Any:
    """The Euclidean norm in float64, with the same bits on every device.

    `norm(norm(list))` is the norm of all arrays of the list together.

    Args:
        x: array of any float dtype and shape, or a list of n arrays of one dtype.
        out: buffer for the result, float64 [1], or [n] for a list.
        workspace: uint8, from `norm_workspace`; None: allocated by the call.

    Returns:
        float64 [1], or [n] for a list: one norm for each array.

    Raises:
        InvalidArgument: wrong dtype, layout or buffer, or an empty list; nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    rows = _several(x)
    module = devices.module(rows.device)
    table = inputs.Table(rows.words)
    out, result = inputs.output(out, "out", rows, len(rows), "float64")
    scratch = inputs.workspace(workspace, rows, module.norm_workspace_bytes(table.address))
    read = rows.spans("x")
    inputs.check_memory("norm", [result, scratch], read)
    module.norm(
        table.address,
        rows.dtype,
        result.pointer,
        (scratch.pointer, scratch.nbytes),
        *devices.queue(rows.device, rows.array),
    )
    return out


def norm_workspace(x: Any) -> Any:
    """A new workspace for `norm`. Its content is not kept between calls.

    Args:
        x: array of any float dtype and shape, or a list of arrays of one dtype. The workspace fits
            every argument of `norm` with the same numbers of elements on the same device.

    Returns:
        uint8 [n] on the device of x.

    Raises:
        InvalidArgument: wrong dtype or layout, or an empty list.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    rows = _several(x)
    table = inputs.Table(rows.words)
    nbytes = devices.module(rows.device).norm_workspace_bytes(table.address)
    return arrays.new(rows, (nbytes,), "uint8")


def clip_scale(
    norms: Any, limit: float, scale: float = 1.0, *, dtype: str = "float32", out: Any = None
) -> Any:
    """scale * min(1, limit / norm) for each norm: factors for `dgc_step`, made on the device.

    A norm that is 0, infinite or NaN does not clip, so one NaN does not spread to a whole array.

    Args:
        norms: float64 [n], as `norm` returns them.
        limit: the largest norm; at least 0.
        scale: a common factor, for example one over the loss scale.
        dtype: of the factors, "float32" or "float64": the dtype of u and v.
        out: buffer for the result, [n] of `dtype`.

    Returns:
        The factors, [n] of `dtype`.

    Raises:
        InvalidArgument: wrong dtype, buffer, limit or scale; nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    found = inputs.array(norms, "norms", ("float64",))
    limit = _limit(limit)
    one_of("dtype", dtype, ("float32", "float64"))
    out, factors = inputs.output(out, "out", found, found.count, dtype)
    inputs.check_memory("clip_scale", [factors], [found])
    devices.module(found.device).clip_scale(
        found.pointer,
        (factors.pointer, factors.count),
        dtype,
        limit,
        number("scale", scale),
        *devices.queue(found.device, found.array),
    )
    return out


def clip_(x: Any, limit: float) -> Any:
    """x = x * min(1, limit / |x|), in place, with the factor of `clip_scale`. Returns x.

    Args:
        x: any float dtype and shape.
        limit: the largest norm; at least 0.

    Raises:
        InvalidArgument: wrong dtype, layout or limit; nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
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
        dtype: "float16", "bfloat16", "float32" or "float64", or torch's or NumPy's dtype object.
        out: buffer for the result, of the shape of x.

    Returns:
        A new array of the shape of x, or `out`.

    Raises:
        InvalidArgument: wrong dtype, layout or buffer; nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    found = inputs.array(x, "x", inputs.FLOATS)
    if isinstance(dtype, type):
        name = dtype.__name__  # np.float32 is a class
    elif isinstance(dtype, np.dtype) or type(dtype).__name__ == "dtype":  # torch's
        name = str(dtype).removeprefix("torch.")
    else:
        name = dtype
    name = one_of("dtype", name, inputs.FLOATS)
    if out is None:
        out = arrays.new(found, found.shape, name)
    result = inputs.array(out, "out", (name,), write=True)
    inputs.same_shape(found, result, ("x", "out"))
    inputs.check_memory("cast", [result], [found])
    devices.module(found.device).cast(
        (found.pointer, found.count),
        found.dtype,
        (result.pointer, result.count),
        name,
        *devices.queue(found.device, found.array),
    )
    return out


def reduce_(out: Any, xs: Sequence[Any], op: str = "sum") -> Any:
    """out[i] = xs[0][i] (+) xs[1][i] (+) ..., left to right, in place. Returns `out`.

    16-bit floats are added in float32 and rounded once. `out` may be one of `xs`.

    Args:
        out: any dtype that collectives accept, any shape.
        xs: at least one array, of the shape and dtype of `out`.
        op: as in pycomm.all_reduce.

    Raises:
        InvalidArgument: an unknown op, no arrays, or arrays that do not agree; nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    result = inputs.array(out, "out", _core.DTYPES, write=True)
    if not isinstance(xs, (list, tuple)):
        refuse("xs", xs, "a list of arrays")
    found = [inputs.array(x, f"xs[{i}]", (result.dtype,)) for i, x in enumerate(xs)]
    if not found:
        raise InvalidArgument("reduce_: invalid xs: got an empty list, expected at least one array")
    name = _core.reduce_op_name(op)
    for i, x in enumerate(found):
        inputs.same_shape(result, x, ("out", f"xs[{i}]"))
    same = result.pointer, result.device
    others = [x for x in found if (x.pointer, x.device) != same]
    inputs.check_memory("reduce_", [result], others)
    table = inputs.Table([(x.pointer,) for x in found])
    devices.module(result.device).reduce(
        (result.pointer, result.count),
        result.dtype,
        table.address,
        name,
        *devices.queue(result.device, result.array),
    )
    return out


def _several(x: Any) -> Rows:
    """The rows of an array or of a list of arrays."""
    listed = list(x) if isinstance(x, list | tuple) else [x]
    if not listed:
        raise InvalidArgument("norm: invalid x: got an empty list, expected at least one array")
    return Rows.of({"x": listed}, {"x": inputs.FLOATS}, "norm")


def _limit(limit: Any) -> float:
    found = number("limit", limit)
    if found < 0:
        raise InvalidArgument(f"invalid limit: got {found}, expected at least 0")
    return found
