"""Exact selection by magnitude. csrc/kernels/device_kernels.h has the definitions. Called by users,
as pycomm.kernels."""

from __future__ import annotations

from typing import Any

from pycomm import arrays
from pycomm.errors import InvalidArgument
from pycomm.kernels import devices, inputs


def topk(
    x: Any, k: int, *, indices: Any = None, values: Any = None, workspace: Any = None
) -> tuple[Any, Any]:
    """The k elements of the largest magnitude, exactly and always the same ones.

    The magnitude is the bits without the sign, so NaN ranks above infinity and infinity above all
    numbers. Ties go to the lower index.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; an index counts through it in C order.
        k: 0..count.
        indices, values: buffers for the result.
        workspace: uint8, as many bytes as `topk_workspace` makes; what it holds does not matter.

    Returns:
        (indices int32 [k], ascending, values [k] of the dtype of x).

    Raises:
        InvalidArgument, Unsupported: before anything changes.
    """
    found = inputs.array(x, "x", inputs.FLOATS)
    k = inputs.how_many(k, found.count)
    indices, where = inputs.output(indices, "indices", found, k, "int32")
    values, what = inputs.output(values, "values", found, k, found.dtype)
    _select(found, k, where, what, None, workspace, "topk")
    return indices, values


def threshold(x: Any, k: int, *, out: Any = None, workspace: Any = None) -> Any:
    """The k-th largest magnitude of x, of the dtype of x; array [1]. Arguments as of `topk`.

    Raises:
        InvalidArgument, Unsupported: before anything changes; also for k = 0.
    """
    found = inputs.array(x, "x", inputs.FLOATS)
    k = inputs.how_many(k, found.count)
    if k == 0:
        raise InvalidArgument("threshold: there is no 0th magnitude: k must be at least 1")
    out, result = inputs.output(out, "out", found, 1, found.dtype)
    _select(found, k, None, None, result, workspace, "threshold")
    return out


def topk_workspace(x: Any, k: int) -> Any:
    """A new workspace for `topk` and `threshold` of arrays of the count and dtype of x; uint8."""
    found = inputs.array(x, "x", inputs.FLOATS)
    k = inputs.how_many(k, found.count)
    nbytes = devices.module(found.device).topk_workspace_bytes(found.count, k, found.dtype)
    return arrays.new(found, (nbytes,), "uint8")


def _select(
    x: arrays.ArrayRef,
    k: int,
    indices: arrays.ArrayRef | None,
    values: arrays.ArrayRef | None,
    result: arrays.ArrayRef | None,
    workspace: Any,
    name: str,
) -> None:
    module = devices.module(x.device)
    room = inputs.workspace(workspace, x, module.topk_workspace_bytes(x.count, k, x.dtype))
    written = [one for one in (indices, values, result, room) if one is not None]
    inputs.same_device([x, *written], name)
    inputs.require_no_overlap(written, [x], name)
    module.topk(
        (x.pointer, x.count),
        x.dtype,
        k,
        *(0 if one is None else one.pointer for one in (indices, values, result)),
        (room.pointer, room.nbytes),
        *devices.queue(x.device, x.array),
    )
