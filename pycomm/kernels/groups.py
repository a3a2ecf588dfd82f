"""The update step: selection of groups of neighbours, and their packets.

csrc/kernels/groups.h has the formulas, csrc/codec/groups.h the layout of a packet, and
pycomm.reference the meaning in NumPy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pycomm import _core
from pycomm._arguments import instance, integer, integers, one_of
from pycomm._core_api import arrays, devices
from pycomm._core_api.arrays import ArrayRef
from pycomm.errors import InvalidArgument
from pycomm.kernels import compact, inputs
from pycomm.kernels.batch import GroupBatch, PacketBatch, concatenated
from pycomm.kernels.inputs import Spans
from pycomm.kernels.rows import Rows

PARAMETERS = ("float16", "bfloat16", "float32")


class UpdateWorkspace(NamedTuple):
    """Buffers of an update step, which keep nothing between calls.

    Attributes:
        packet: uint8, for the largest packet.
        indices: int32 [k].
        values: float32 [k * group].
        scratch: uint8.
    """

    packet: Any
    indices: Any
    values: Any
    scratch: Any


class UpdatePacket(NamedTuple):
    """What a rank sends in an update step, and what a rollback needs.

    Attributes:
        packet: uint8 [bytes], a packet of groups, which `decode_groups` reads.
        indices: int32 [k], ascending, the selected groups.
        values: float32 [n], the residual in these groups before they were sent.
    """

    packet: Any
    indices: Any
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
    group, k = _checked(rows, group, k)
    indices, sums = (arrays.new(rows, (k,), dtype) for dtype in ("int32", "float32"))
    table = inputs.Table(rows.words)
    scratch = _Scratch(rows, group, k)
    devices.module(rows.device).topk_groups(
        table.address,
        group,
        k,
        _pointer(indices),
        _pointer(sums),
        scratch.address,
        *devices.queue(rows.device, rows.array),
    )
    return indices, sums


def update_step(
    theta: Any,
    param: Any,
    residual: Any,
    k: int,
    *,
    group: int = 16,
    value_dtype: str = "1bit",
    workspace: UpdateWorkspace | None = None,
) -> UpdatePacket:
    """Compresses an optimizer's update with error feedback, in one pass over memory.

    `residual += theta - param; param = theta`. Then the k groups of the residual with the largest
    norm are selected as by `topk_groups`, and encoded. There the residual becomes the rounding
    error, or 0 if that is not finite: a NaN in the residual makes all values that share its
    magnitudes NaN at every receiver.

    All arrays can be lists of arrays; the selection is among all of them.

    Args:
        theta: parameters before the optimizer's steps, float16, bfloat16 or float32. Read only.
        param: parameters after them, of the dtype and shape of theta or flat. In place.
        residual: float32, of the shape of theta or flat: what was not sent so far. In place.
        k: number of groups to select, 0 to the number of groups.
        group: elements of a group: 1, 2, 4, ... 1024.
        value_dtype: "1bit", "2bit", "3bit", "bfloat16" or "float32", as in `encode`.
        workspace: from `update_workspace`; None: allocated by the call.

    Returns:
        The packet, and the selection for `update_rollback`: views of the workspace. On a GPU the
        call waits for the device, which computes their lengths.

    Raises:
        InvalidArgument: invalid arrays, k, group or value_dtype; nothing changes.
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
    _known_values(value_dtype)
    group, k = _checked(rows, group, k)
    if workspace is None:
        workspace = _workspace(rows, k, group, value_dtype)
    instance("workspace", workspace, UpdateWorkspace, "an UpdateWorkspace, or None")
    groups = group_count(rows.counts, group)
    most = _core.most_group_bytes(k, groups, k * group, value_dtype)
    packet = _buffer(workspace.packet, "workspace.packet", "uint8", most)
    indices = _buffer(workspace.indices, "workspace.indices", "int32", k)
    values = _buffer(workspace.values, "workspace.values", "float32", k * group)
    scratch = inputs.workspace(workspace.scratch, rows, _scratch_bytes(rows, group, k))
    written: list[ArrayRef | Spans] = [*rows.spans("param", "residual")]
    written += [packet, indices, values, scratch]
    inputs.check_memory("update_step", written, rows.spans("theta"))
    table = inputs.Table(rows.words)
    sizes = arrays.new(rows, (2,), "int64")
    devices.module(rows.device).update_step(
        table.address,
        rows.dtype,
        group,
        k,
        value_dtype,
        indices.pointer,
        values.pointer,
        packet.pointer,
        _pointer(sizes),
        (scratch.pointer, scratch.nbytes),
        *devices.queue(rows.device, rows.array),
    )
    count, nbytes = sizes.tolist()
    return UpdatePacket(workspace.packet[:nbytes], workspace.indices[:k], workspace.values[:count])


def update_workspace(
    theta: Any, k: int, *, group: int = 16, value_dtype: str = "1bit"
) -> UpdateWorkspace:
    """New buffers for `update_step`.

    Args:
        theta: as in `update_step`; also fits fewer or smaller arrays.
        k: number of groups to select, or more.
        group: elements of a group, as in that step.
        value_dtype: as in that step.

    Raises:
        InvalidArgument: invalid arrays, k, group or value_dtype.
        Unsupported: arrays of another kind, or CUDA arrays if the CUDA kernels are not built.
    """
    rows = Rows.of({"theta": _listed(theta)}, {"theta": PARAMETERS}, "update_workspace")
    _known_values(value_dtype)
    group, k = _checked(rows, group, k)
    return _workspace(rows, k, group, value_dtype)


def update_rollback(residual: Any, indices: Any, values: Any, *, group: int = 16) -> None:
    """Writes values to the selected groups of the residual, in place.

    With the result of `update_step` the step has sent nothing; its update stays in the residual.

    Args:
        residual: float32, one array or a list, as in that step. In place.
        indices: int32 [k], ascending, groups.
        values: float32 [n], the elements of these groups.
        group: elements of a group, as in that step.

    Raises:
        InvalidArgument: invalid or inconsistent arrays; nothing changes. A GPU cannot check the
            indices and how many values they need; it ignores what is out of range.
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
    inputs.same_device("update_rollback", where, what, *rows.spans("residual"))
    group, k = _checked(rows, group, where.count)
    inputs.check_memory("update_rollback", rows.spans("residual"), [where, what])
    table = inputs.Table(rows.words)
    scratch = _Scratch(rows, group, k)
    devices.module(rows.device).write_groups(
        table.address,
        group,
        (where.pointer, where.count),
        (what.pointer, what.count),
        scratch.address,
        *devices.queue(rows.device, rows.array),
    )


def decode_groups(
    packets: Any, sizes: Sequence[int], counts: Sequence[int], *, group: int = 16
) -> PacketBatch:
    """Decodes packets of groups to elements, for `decode_sum` and `decode_update`.

    On a GPU it waits for the device twice: for the headers, which say how long the arrays are, and
    for the result of the checks.

    Args:
        packets: uint8 [sum(sizes)]: concatenated packets of `update_step`.
        sizes: bytes of each packet.
        counts: elements of each array of the step.
        group: elements of a group, as in that step.

    Returns:
        The batch: indices of elements count through all arrays; values are float32.

    Raises:
        InvalidArgument: the bytes are not packets of groups of such arrays.
        Unsupported: arrays of another kind, or CUDA arrays if the CUDA kernels are not built.
    """
    given = _Packets(packets, sizes, counts, group)
    found, lengths = given.found, given.values
    shapes = (sum(lengths), "int32"), (sum(lengths), "float32"), (len(sizes), "int32")
    indices, values, refused = (arrays.new(found, (count,), dtype) for count, dtype in shapes)
    module = devices.module(found.device)
    nbytes = module.group_decoding_bytes(*given.words, 0, 0, 0, 0, 0)
    scratch = arrays.new(found, (nbytes,), "uint8")
    module.decode_groups(
        *given.words,
        *map(_pointer, (indices, values, refused)),
        (_pointer(scratch), nbytes),
        *devices.queue(found.device, found.array),
    )
    wrong = [number for number, bad in enumerate(refused.tolist()) if bad]
    if wrong:
        raise InvalidArgument(
            f"invalid packets of groups: got invalid content in {wrong}, expected groups of arrays "
            f"with {list(counts)} elements"
        )
    return PacketBatch(indices, values, lengths)


def read_groups(
    packets: Any, sizes: Sequence[int], counts: Sequence[int], *, group: int = 16
) -> GroupBatch | PacketBatch:
    """Checks packets of groups and prepares them for `decode_sum` and `decode_update`.

    In host memory only the indices of groups are decoded: 4 bytes for each group, while
    `decode_groups` needs 8 bytes for each element. On a GPU it is `decode_groups`.

    Args:
        packets: uint8 [sum(sizes)]: concatenated packets of `update_step`.
        sizes: bytes of each packet.
        counts: elements of each array of the step.
        group: elements of a group, as in that step.

    Returns:
        The batch, for arrays with these counts. It refers to `packets`, which must not change.

    Raises:
        InvalidArgument: the bytes are not packets of groups of such arrays.
        Unsupported: arrays of another kind, or CUDA arrays if the CUDA kernels are not built.
    """
    given = _Packets(packets, sizes, counts, group)
    if given.found.device.kind != "cpu":
        return decode_groups(packets, sizes, counts, group=group)
    indices = arrays.new(given.found, (sum(given.lengths),), "int32")
    _core.read_group_indices(*given.words, _pointer(indices), 0, 0, 0, 0)
    return GroupBatch(packets, given.sizes, indices, given.lengths, given.values, given.group)


class _Packets:
    """Packets of groups with valid headers.

    Attributes:
        found: the bytes.
        sizes, lengths, values: bytes, groups and values of each packet.
        group: elements of a group.
        words: of a call: table of the counts, group, table of the packets.
    """

    def __init__(
        self, packets: Any, sizes: Sequence[int], counts: Sequence[int], group: int
    ) -> None:
        self.group = inputs.group_size(group)
        found, self.sizes = self.found, _ = concatenated(packets, sizes)
        counts = integers("counts", counts, 0, inputs.MOST_ELEMENTS)
        _within_limit(sum(counts))
        begins = [0, *itertools.accumulate(self.sizes)][: len(self.sizes)]
        headers = _headers(found, begins, self.sizes)
        groups = group_count(counts, self.group)
        for number, (_, of_groups, _) in enumerate(headers):
            if of_groups != groups:
                raise InvalidArgument(
                    f"invalid packet of groups: packet {number} is of {of_groups} groups, expected "
                    f"{groups}"
                )
        self.lengths = [k for k, _, _ in headers]
        self.values = [values for _, _, values in headers]
        each = zip(begins, self.sizes, self.lengths, self.values, strict=True)
        self._tables = [
            inputs.Table(np.array(counts, np.uint64)[:, None]),
            inputs.Table([(found.pointer + begin, *row) for begin, *row in each]),
        ]
        self.words = self._tables[0].address, self.group, self._tables[1].address


def _headers(
    packets: ArrayRef, begins: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(k, groups, values) of each packet; waits for the device once."""
    if packets.device.kind == "cpu":
        return _core.read_group_headers(packets.pointer, begins, sizes)
    lengths = [min(nbytes, _core.MOST_GROUP_HEAD) for nbytes in sizes]
    places = [0, *itertools.accumulate(lengths)][: len(lengths)]
    heads = arrays.new(packets, (sum(lengths),), "uint8")
    for place, begin, length in zip(places, begins, lengths, strict=True):
        heads[place : place + length] = packets.array[begin : begin + length]
    on_host = np.array(heads.tolist(), np.uint8)
    return _core.read_group_headers(on_host.ctypes.data, places, sizes)


def group_count(counts: Sequence[int] | NDArray[np.uint64], group: int) -> int:
    """Groups of arrays with these numbers of elements."""
    return sum(-(-int(count) // group) for count in counts)


def _workspace(rows: Rows, k: int, group: int, value_dtype: str) -> UpdateWorkspace:
    groups = group_count(rows.counts, group)
    sizes = {
        "packet": (_core.most_group_bytes(k, groups, k * group, value_dtype), "uint8"),
        "indices": (k, "int32"),
        "values": (k * group, "float32"),
        "scratch": (_scratch_bytes(rows, group, k), "uint8"),
    }
    return UpdateWorkspace(
        **{name: arrays.new(rows, (count,), dtype) for name, (count, dtype) in sizes.items()}
    )


def _scratch_bytes(rows: Rows, group: int, k: int) -> int:
    module = devices.module(rows.device)
    return int(module.group_workspace_bytes(len(rows), group_count(rows.counts, group), k))


class _Scratch:
    """A workspace of a call; must live until the core returns."""

    def __init__(self, rows: Rows, group: int, k: int) -> None:
        nbytes = _scratch_bytes(rows, group, k)
        self._memory = arrays.new(rows, (nbytes,), "uint8")
        self.address = _pointer(self._memory), nbytes


def _buffer(x: Any, name: str, dtype: str, least: int) -> ArrayRef:
    found = inputs.array(x, name, (dtype,), write=True)
    if found.count < least:
        raise InvalidArgument(
            f"invalid {name}: got {found.count} elements, expected at least {least}"
        )
    return found


def _known_values(value_dtype: str) -> None:
    one_of("value_dtype", value_dtype, compact.VALUES)


def _checked(rows: Rows, group: int, k: int) -> tuple[int, int]:
    """The validated group and k."""
    group = inputs.group_size(group)
    _within_limit(int(rows.counts.sum()))
    return group, integer("k", k, 0, group_count(rows.counts, group))


def _within_limit(total: int) -> None:
    if total > inputs.MOST_ELEMENTS:
        raise InvalidArgument(
            f"the arrays have {total} elements together, and an int32 index counts at most "
            f"{inputs.MOST_ELEMENTS}: select from fewer"
        )


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
