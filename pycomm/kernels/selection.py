"""Exact selection by magnitude. csrc/kernels/device_kernels.h has the definitions."""

from __future__ import annotations

from typing import Any

from pycomm._arguments import integer
from pycomm._core_api import arrays, devices
from pycomm.errors import InvalidArgument
from pycomm.kernels import inputs


def topk(
    x: Any, k: int, *, indices: Any = None, values: Any = None, workspace: Any = None
) -> tuple[Any, Any]:
    """The k elements of the largest magnitude. The selection is exact and deterministic.

    The magnitude is the bits without the sign, so NaN ranks above infinity and infinity above all
    numbers. Among equal magnitudes the lower index is selected.

    Args:
        x: float16, bfloat16, float32 or float64, any shape; indices count in C order.
        k: number of elements to select, 0..count.
        indices, values: buffers for the result: int32 [k], and [k] of the dtype of x.
        workspace: uint8, from `topk_workspace`; None: allocated by the call.

    Returns:
        (indices int32 [k], ascending, values [k] of the dtype of x).

    Raises:
        InvalidArgument: wrong dtype, layout, k or buffer; nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    found = inputs.array(x, "x", inputs.FLOATS)
    k = integer("k", k, 0, found.count)
    indices, where = inputs.output(indices, "indices", found, k, "int32")
    values, what = inputs.output(values, "values", found, k, found.dtype)
    _select(found, k, where, what, None, workspace, "topk")
    return indices, values


def threshold(x: Any, k: int, *, out: Any = None, workspace: Any = None) -> Any:
    """The k-th largest magnitude of x.

    Args:
        x: float16, bfloat16, float32 or float64, any shape.
        k: rank of the magnitude, 1..count.
        out: buffer for the result, [1] of the dtype of x.
        workspace: uint8, from `topk_workspace`; None: allocated by the call.

    Returns:
        [1], of the dtype of x.

    Raises:
        InvalidArgument: wrong dtype, layout, k or buffer; nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    found = inputs.array(x, "x", inputs.FLOATS)
    k = integer("k", k, 0, found.count)
    if k == 0:
        raise InvalidArgument("threshold: invalid k: got 0, expected at least 1")
    out, result = inputs.output(out, "out", found, 1, found.dtype)
    _select(found, k, None, None, result, workspace, "threshold")
    return out


def topk_workspace(x: Any, k: int) -> Any:
    """A new workspace for `topk` and `threshold`. Its content is not kept between calls.

    Args:
        x: float16, bfloat16, float32 or float64, any shape. The workspace fits every array with
            the same number of elements and dtype on the same device.
        k: number of elements that the calls select, 0..count.

    Returns:
        uint8 [n] on the device of x.

    Raises:
        InvalidArgument: wrong dtype, layout or k.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    found = inputs.array(x, "x", inputs.FLOATS)
    k = integer("k", k, 0, found.count)
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
    scratch = inputs.workspace(workspace, x, module.topk_workspace_bytes(x.count, k, x.dtype))
    written = [one for one in (indices, values, result, scratch) if one is not None]
    inputs.check_memory(name, written, [x])
    module.topk(
        (x.pointer, x.count),
        x.dtype,
        k,
        *(0 if one is None else one.pointer for one in (indices, values, result)),
        (scratch.pointer, scratch.nbytes),
        *devices.queue(x.device, x.array),
    )
