"""How a call is made: its arrays checked against each other, then run, or started as a Work.

The verbs themselves, with their arguments, are in collectives.py, which calls this file.
"""

from __future__ import annotations

import functools
import math
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias

import numpy as np

from pycomm import _core, arrays, device_groups
from pycomm.arrays import View
from pycomm.errors import InvalidArgument, Mismatch
from pycomm.group import Group, default

__all__ = [
    "Work",
    "copy_if_overlapping",
    "dispatch",
    "exchange_lengths",
    "into_list",
    "limit",
    "output",
    "rows",
]

# What the core's run() and start() take, up to the time limit.
Call: TypeAlias = tuple[str, str, str, int, int, int, int, int, str]
P = ParamSpec("P")


class _Off:
    """Stands for torch's profiler as long as torch is not there."""

    _is_profiler_enabled = False


# In which calls are named while it records. torch's import sets it (_torch_autoload.py), if that
# comes after ours.
profiler: Any = sys.modules.get("torch.autograd.profiler", _Off)


class Work:
    """A call under way. Its arrays must be left alone until it is over.

    A result for an array that is not contiguous is copied there by wait() or result(). On a device
    they return when the call is enqueued: what is put on the current stream from then on comes
    after it.
    """

    __slots__ = ("_array", "_core", "_output", "_result")

    def __init__(self, core: _core.Work, output: View | None, result: Any, array: View | None):
        self._core = core
        self._output = output
        self._result = result
        self._array = array  # on a device, or None

    def done(self) -> bool:
        """Whether the call is over, well or badly."""
        return self._core.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the call is over; raises its error, or Timeout after `timeout_s` seconds.

        After such a Timeout the call goes on, and can be waited for again.
        """
        self._core.wait(limit(timeout_s))
        if self._array is not None:
            self._core.precede(device_groups.stream(self._array.device, self._array.array))
        output, self._output = self._output, None
        if output is not None:
            output.finish()

    def result(self) -> Any:
        """Waits, and gives what the call without async_op returns."""
        self.wait()
        return self._result


def _profiled(
    make: Callable[Concatenate[Group | None, Call, P], Any],
) -> Callable[Concatenate[Group | None, Call, P], Any]:
    """The same, with a name in torch's profiler while that records."""

    @functools.wraps(make)
    def profiled(group: Group | None, call: Call, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        if not profiler._is_profiler_enabled:
            return make(group, call, *args, **kwargs)
        with profiler.record_function(f"pycomm:{call[0]}"):
            return make(group, call, *args, **kwargs)

    return profiled


@_profiled
def dispatch(
    group: Group | None,
    call: Call,
    timeout_s: float | None,
    async_op: bool,
    source: View | None,
    output: View | None,
    result: Any,
    counts: Sequence[int] | None = None,
    counts_fit: bool = False,
) -> Any:
    """Makes the call, or starts it, and copies back where that is needed.

    `counts` are the elements of each rank, where they differ. `counts_fit`, of an all_to_all: the
    ranks have exchanged them, so that the call does not compare them again.
    """
    group = group or default()
    limit_s = 0.0 if timeout_s is None else limit(timeout_s)
    array = _on_device(source, output)
    core, stream = group._core, 0
    if array is not None:
        core = device_groups.core(group, array.device, limit_s)
        stream = device_groups.stream(array.device, array.array)
    if async_op:
        work = core.start((source, output), *call, limit_s, counts, stream, counts_fit)
        return Work(work, output, result, array)
    core.run(*call, limit_s, counts, stream, counts_fit)
    if output is not None and output.target is not None:
        output.finish()
    return result


def _on_device(source: View | None, output: View | None) -> View | None:
    """The array that says on which device the call is; None: in host memory."""
    if source is not None and output is not None and source.device != output.device:
        raise InvalidArgument(f"x lies on {source.device} and out on {output.device}")
    array = source or output
    return None if array is None or array.device.kind == "cpu" else array


def limit(timeout_s: float | None) -> float:
    """The core's spelling of a time limit: 0 for none of its own."""
    if timeout_s is None:
        return 0.0
    if not timeout_s > 0:
        raise InvalidArgument(f"timeout_s is {timeout_s}; it must be more than 0 seconds")
    return timeout_s


def output(out: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """`out`, checked against `shape` and the dtype of `x`; a new array if it is None."""
    if out is None:
        return arrays.empty_like(x, shape)
    given = arrays.plain(out).shape
    if given != shape:
        raise InvalidArgument(f"out has shape {list(given)} and the result {list(shape)}")
    return out


def copy_if_overlapping(source: View, target: View, place: int | None) -> View:
    """`source`, or a copy of it where it shares memory with `target` other than as the core allows.

    `place` is how many bytes after the target's first the source may begin; None: they share none.
    """
    if source.dtype != target.dtype:
        raise InvalidArgument(f"out is of dtype {target.dtype} and x of {source.dtype}")
    first, last = source.pointer, source.pointer + source.nbytes
    shared = first < target.pointer + target.nbytes and target.pointer < last
    if not shared or (place is not None and first == target.pointer + place):
        return source
    return arrays.copied(source)


def rows(x: Any, size: int, verb: str) -> tuple[int, ...]:
    """The shape of a row of `x`, which has one for each of `size` ranks."""
    shape = tuple(x.shape)
    if not shape or shape[0] != size:
        raise InvalidArgument(
            f"{verb} takes x of shape [size, ...], one row for each of the {size} ranks, "
            f"not {list(shape)}",
            op=verb,
        )
    return shape[1:]


def exchange_lengths(group: Group, x: Any, dtype: str, timeout_s: float | None) -> list[int]:
    """Collective. By rank: the length of its `x`, whose rows are the same everywhere.

    Raises:
        Mismatch: on every rank, where rows or dtypes differ.
    """
    shape = tuple(x.shape)
    if not shape:
        raise InvalidArgument("all_gather_v takes x of shape [n, ...], not a single number")
    row = zlib.crc32(repr((shape[1:], dtype)).encode())
    mine = np.array([shape[0], row, math.prod(shape[1:]), _core.DTYPES.index(dtype)], np.int64)
    every = np.empty((group.size, 4), np.int64)
    source, target = arrays.view(mine), arrays.view(every, write=True)
    call = ("all_gather", "int64", "sum", source.pointer, target.pointer, 4, 0, 0, "auto")
    dispatch(group, call, timeout_s, False, source, target, None)
    for rank, (_, other, width, kind) in enumerate(every.tolist()):
        if other != every[0, 1]:
            first = f"rank 0 {every[0, 2]} {_core.DTYPES[every[0, 3]]}"
            raise Mismatch(
                f"all_gather_v: the ranks' rows differ: {first}, rank {rank} {width} "
                f"{_core.DTYPES[kind]}, or of another shape",
                op="all_gather_v",
                rank=group.rank,
                peer=rank,
            )
    return [int(length) for length in every[:, 0]]


def into_list(whole: View, parts: list[Any], out: Any) -> View:
    """The view `whole`, whose finish() copies its `parts` to the arrays of the list `out`."""
    if not isinstance(out, (list, tuple)) or len(out) != len(parts):
        raise InvalidArgument(f"out must be a list of {len(parts)} arrays, one for each rank")
    for one, part in zip(out, parts, strict=True):
        output(one, part, tuple(part.shape))
        if arrays.view(one, write=True).dtype != whole.dtype:
            raise InvalidArgument(f"out has an array of another dtype than x: {whole.dtype}")
    return View(whole.pointer, whole.dtype, whole.count, parts, list(out), whole.device)
