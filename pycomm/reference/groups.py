"""The definition of the update step and of packets of groups: see the package for conventions.

The elements of each array form groups of neighbours; the last group of an array may be shorter.
Numbers of groups count through all arrays, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pycomm.reference import compact
from pycomm.reference.kernels import topk

Array = Any  # a NumPy array


class Update(NamedTuple):
    """The result of an update step.

    Attributes:
        residual: the residuals after the step, float32, a list of arrays.
        packet: the bytes of the packet.
        indices: int32 [k], ascending: the selected groups.
        values: float32 [k * group]: the residual in these groups before they were sent; 0 after the
            end of an array.
    """

    residual: list[Array]
    packet: bytes
    indices: Array
    values: Array


def update_step(
    theta: Sequence[Array],
    param: Sequence[Array],
    residual: Sequence[Array],
    k: int,
    *,
    group: int = 16,
    value_dtype: str = "1bit",
) -> Update:
    """residual + (theta - param), without what is sent of its k largest groups.

    The parameters are theta after the step. A rounding error that is not finite becomes 0.

    Args:
        theta: parameters before the optimizer's steps, a list of arrays.
        param: parameters after them, as theta.
        residual: what was not sent so far, float32, as theta.
        k: number of groups to select, 0 to the number of groups.
        group: elements of a group: 1, 2, 4, ... 1024.
        value_dtype: one of "1bit", "2bit", "3bit", "bfloat16" and "float32".
    """
    with np.errstate(all="ignore"):
        new = [
            _one_nan(e + (t.astype(np.float32) - p.astype(np.float32)))
            for t, p, e in zip(theta, param, residual, strict=True)
        ]
    indices, _ = topk_groups(new, k, group)
    padded = [np.pad(x.reshape(-1), (0, -x.size % group)) for x in new]
    rows = np.concatenate([np.zeros(0, np.float32), *padded]).reshape(-1, group)
    values = rows[indices].reshape(-1)
    packet, errors = compact.encode_groups(indices, values, len(rows), value_dtype, group)
    rows[indices] = np.where(np.isfinite(errors), errors, np.float32(0)).reshape(-1, group)
    parts = np.split(rows.reshape(-1), np.cumsum([len(x) for x in padded])[:-1])
    return Update(
        [part[: x.size].reshape(x.shape) for part, x in zip(parts, new, strict=True)],
        packet,
        indices,
        values,
    )


def topk_groups(x: Sequence[Array], k: int, group: int = 16) -> tuple[Array, Array]:
    """(indices int32 [k] ascending, float32 [k]): the groups with the largest sums of squares.

    Args:
        x: float32 arrays.
        k: 0 to the number of groups. Among equal sums the lower index is selected.
        group: elements of a group: 1, 2, 4, ... 1024.
    """
    sums = [np.zeros(0, np.float32)]
    for each in x:
        with np.errstate(all="ignore"):
            squares = np.square(np.pad(each.reshape(-1), (0, -each.size % group)))
            width = group
            while width > 1:
                squares = squares[0::2] + squares[1::2]
                width //= 2
        sums.append(squares)
    return topk(np.concatenate(sums), k)


def group_elements(counts: Sequence[int], group: int, indices: Array) -> Array:
    """int32 [n]: the elements of these groups; they count through arrays of `counts` elements."""
    number = [np.zeros(0, np.int64)]
    first = 0
    for count in counts:
        number.append(first + np.arange(count) // group)
        first += -(-count // group)
    return np.flatnonzero(np.isin(np.concatenate(number), indices)).astype(np.int32)


def _one_nan(x: Array) -> Array:
    return np.where(np.isnan(x), np.array(np.nan, x.dtype), x)
