"""Groups of neighbours: the update step, the selection of groups, and their packets.

csrc/kernels/groups.h has the formulas, csrc/codec/compact.h the layout of a packet, and
pycomm.reference the meaning in NumPy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pycomm._arguments import integer, integers, one_of
from pycomm._core_api import arrays, devices
from pycomm.errors import InvalidArgument
from pycomm.kernels import compact, inputs
from pycomm.kernels.rows import Rows

PARAMETERS = ("float16", "bfloat16", "float32")


class GroupPackets(NamedTuple):
    """What `encode_groups` took from its arrays.

    Attributes:
        packets: uint8, which `read_groups` and `decode_batch` read.
        lengths: number of groups of each; a packet without groups is empty.
        values: float32 [k * group]: what was there, for `update_rollback`; 0 after the end of an
            array.
    """

    packets: list[Any]
    lengths: list[int]
    values: Any


def topk_groups(x: Any, k: int, group: int = 16) -> tuple[Any, Any]:
    """The k groups of neighbours with the largest norm. Exact and deterministic.

    Each array has its own groups; the last one of an array may be shorter. The squares of a group
    are padded with zeros and added in pairs of neighbours, in float32. NaN ranks above infinity and
    infinity above all numbers; among equal sums the lower index is selected.

    Args:
        x: float32 array of any shape, or a list of arrays. Indices of groups count through all of
            them, each in C order.
        k: number of groups to select, 0 to the number of groups.
        group: elements of a group: 1, 2, 4, ... 1024.

    Returns:
        (indices int32 [k], ascending, sums of squares float32 [k]).

    Raises:
        InvalidArgument: wrong dtype, layout, k or group.
        Unsupported: arrays of another kind, or CUDA arrays if the CUDA kernels are not built.
    """
    rows = Rows.of({"x": _listed(x)}, {"x": ("float32",)}, "topk_groups")
    return _selected("topk_groups", rows, k, group)


def update_step(
    theta: Any, param: Any, residual: Any, k: int, *, group: int = 16
) -> tuple[Any, Any]:
    """Adds an optimizer's update to the residual, and selects the k groups of it with the largest
    norm as `topk_groups` does, in one pass over memory.

    `residual += theta - param; param = theta`. `encode_groups` then takes the groups from the
    residual. All arrays can be lists of arrays; the selection is among all of them.

    Args:
        theta: parameters before the optimizer's steps, float16, bfloat16 or float32. Read only.
        param: parameters after them, of the dtype and shape of theta or flat. In place.
        residual: float32, of the shape of theta or flat: what was not sent so far. In place.
        k: number of groups to select, 0 to the number of groups.
        group: elements of a group: 1, 2, 4, ... 1024.

    Returns:
        (indices int32 [k], ascending, sums of squares float32 [k]).

    Raises:
        InvalidArgument: invalid arrays, k or group; nothing changes.
        Unsupported: arrays of another kind, or CUDA arrays if the CUDA kernels are not built.
    """
    lists = {
        name: _listed(x) for name, x in (("theta", theta), ("param", param), ("residual", residual))
    }
    _same_length(lists)
    dtypes = {"theta": PARAMETERS, "param": PARAMETERS, "residual": ("float32",)}
    rows = Rows.of(lists, dtypes, "update_step", write=("param", "residual"))
    if rows.dtypes["param"] != rows.dtype:
        raise InvalidArgument(
            f"invalid param: got dtype {rows.dtypes['param']}, expected {rows.dtype}, as theta has"
        )
    inputs.check_memory("update_step", rows.spans("param", "residual"), rows.spans("theta"))
    return _selected("update_step", rows, k, group, rows.dtype)


def encode_groups(
    x: Any,
    indices: Any,
    *,
    group: int = 16,
    value_dtype: str = "1bit",
    split: Sequence[int] | None = None,
) -> GroupPackets:
    """Takes groups from the arrays and encodes them, with error feedback: `x` becomes the rounding
    error there, or 0 if that is not finite. A NaN makes all values that share its magnitudes NaN at
    every receiver.

    Args:
        x: float32, one array or a list. In place.
        indices: int32 [k], ascending: groups, as of `topk_groups` of the same arrays.
        group: elements of a group: 1, 2, 4, ... 1024.
        value_dtype: "1bit", "2bit", "3bit", "bfloat16" or "float32", as in `encode`.
        split: the number of arrays of each packet, in order. None: one packet.

    Returns:
        The packets, and what they have. On a GPU the call waits for their sizes, and for the
        indices if there are several packets.

    Raises:
        InvalidArgument: invalid arrays or numbers, or indices that do not ascend in the range of
            groups; nothing changes.
        Unsupported: arrays of another kind, or CUDA arrays if the CUDA kernels are not built.
    """
    rows = Rows.of({"x": _listed(x)}, {"x": ("float32",)}, "encode_groups", write=("x",))
    where = inputs.array(indices, "indices", ("int32",))
    one_of("value_dtype", value_dtype, compact.VALUES)
    group, k = _checked(rows, group, where.count)
    counts = [-(-count // group) for count in rows.counts.tolist()]
    ends = _ends(split, len(counts))
    counts = [sum(counts[begin:end]) for begin, end in itertools.pairwise([0, *ends])]
    inputs.check_memory("encode_groups", rows.spans("x"), [where])
    firsts = np.cumsum([0, *counts])
    lengths = [k] if len(counts) == 1 else _cut(_on_host(indices), firsts)
    values, saved = inputs.output(None, "values", rows, k * group, "float32")
    sent = np.array(lengths, np.uint64)
    begins = np.cumsum(sent) - sent
    columns = [
        np.uint64(where.pointer) + np.uint64(4) * begins,
        np.uint64(saved.pointer) + np.uint64(4 * group) * begins,
        sent,
        firsts[:-1].astype(np.uint64),
        np.array(counts, np.uint64),
        np.zeros(len(counts), np.uint64),
    ]
    table = inputs.Table(rows.words)
    codes = "auto", value_dtype
    made = compact.encode_full(np.column_stack(columns), codes, saved, group, table.address)
    return GroupPackets(made, lengths, values)


def update_rollback(residual: Any, indices: Any, values: Any, *, group: int = 16) -> None:
    """Writes values to the selected groups of the residual, in place.

    With the result of `encode_groups` the step has sent nothing; its update stays in the residual.

    Args:
        residual: float32, one array or a list, as in that call. In place.
        indices: int32 [k], ascending, groups.
        values: float32 [k * group], the elements of these groups.
        group: elements of a group, as in that call.

    Raises:
        InvalidArgument: invalid or inconsistent arrays; nothing changes. A GPU cannot check the
            indices; it ignores what is out of range.
        Unsupported: arrays of another kind, or CUDA arrays if the CUDA kernels are not built.
    """
    rows = Rows.of(
        {"residual": _listed(residual)},
        {"residual": ("float32",)},
        "update_rollback",
        write=("residual",),
    )
    where = inputs.array(indices, "indices", ("int32",))
    what = inputs.array(values, "values", ("float32",))
    group, k = _checked(rows, group, where.count)
    if what.count != k * group:
        raise InvalidArgument(
            f"invalid values: got {what.count} elements, expected {k * group}, those of {k} groups"
        )
    inputs.check_memory("update_rollback", rows.spans("residual"), [where, what])
    table, scratch = inputs.Table(rows.words), _scratch(rows, group, k)
    devices.module(rows.device).write_groups(
        table.address,
        group,
        (where.pointer, where.count),
        what.pointer,
        scratch.address,
        *devices.queue(rows.device, rows.array),
    )


def group_count(counts: Sequence[int] | NDArray[np.uint64], group: int) -> int:
    """Groups of arrays with these numbers of elements."""
    return sum(-(-int(count) // group) for count in counts)


def _selected(call: str, rows: Rows, k: int, group: int, *more: str) -> tuple[Any, Any]:
    """Runs a kernel that selects groups."""
    group, k = _checked(rows, group, k)
    indices, sums = (arrays.new(rows, (k,), dtype) for dtype in ("int32", "float32"))
    table, scratch = inputs.Table(rows.words), _scratch(rows, group, k)
    getattr(devices.module(rows.device), call)(
        table.address,
        *more,
        group,
        k,
        _pointer(indices),
        _pointer(sums),
        scratch.address,
        *devices.queue(rows.device, rows.array),
    )
    return indices, sums


def _scratch(rows: Rows, group: int, k: int) -> compact.Scratch:
    counts = len(rows), group_count(rows.counts, group), k
    nbytes = devices.module(rows.device).group_workspace_bytes(*counts)
    return compact.Scratch(nbytes, rows)


def _ends(split: Sequence[int] | None, arrays: int) -> list[int]:
    """The end of the arrays of each packet."""
    if split is None:
        return [arrays]
    ends = list(itertools.accumulate(integers("split", split, 0, arrays)))
    if not ends or ends[-1] != arrays:
        raise InvalidArgument(
            f"invalid split: got {list(split)}, expected numbers with a sum of {arrays}"
        )
    return ends


def _cut(indices: NDArray[np.int32], firsts: NDArray[np.int64]) -> list[int]:
    """How many of the indices are from each number on to the next; together all of them."""
    places = np.searchsorted(indices, firsts)
    if (np.diff(indices) <= 0).any() or places[0] > 0 or places[-1] < len(indices):
        raise InvalidArgument(f"invalid indices: they must ascend in 0..{firsts[-1] - 1}")
    return [int(length) for length in np.diff(places)]


def _on_host(indices: Any) -> NDArray[np.int32]:
    """A GPU's array, for which it waits, or this one."""
    for copy in ("cpu", "get"):  # torch, CuPy
        indices = getattr(indices, copy, lambda x=indices: x)()
    return np.asarray(indices)


def _checked(rows: Rows, group: int, k: int) -> tuple[int, int]:
    """The validated group and k."""
    group = inputs.group_size(group)
    groups = group_count(rows.counts, group)
    if groups * group > inputs.MOST_ELEMENTS:
        raise InvalidArgument(
            f"the arrays have {groups * group} elements together in whole groups, and an int32 "
            f"index counts at most {inputs.MOST_ELEMENTS}: select from fewer"
        )
    return group, integer("k", k, 0, groups)


def _listed(x: Any) -> list[Any]:
    found = list(x) if isinstance(x, list | tuple) else [x]
    if not found:
        raise InvalidArgument("invalid lists: got empty ones, expected at least one array")
    return found


def _same_length(lists: dict[str, list[Any]]) -> None:
    lengths = {name: len(x) for name, x in lists.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidArgument(f"invalid lists: got lengths {lengths}, expected one length")


def _pointer(x: Any) -> int:
    return arrays.as_array_ref(x, "result", write=True).pointer
