"""Runs a `_core.Call`, or starts it as a Work, and checks arrays against each other.

The public functions are in collectives.py.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
import zlib
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from pycomm import _core
from pycomm._arguments import flag, refuse, seconds
from pycomm._core_api import arrays, device_groups
from pycomm._core_api.arrays import ArrayRef
from pycomm.default_group import chosen
from pycomm.errors import InvalidArgument, Mismatch
from pycomm.group import Group

PROFILER = "torch.autograd.profiler"
"""It records calls by name. The core looks whether it is enabled; torch_backend.py tells it of a
torch that is imported after pycomm."""


if TYPE_CHECKING:  # a default needs Python 3.13
    from typing_extensions import TypeVar as Variable

    Result = Variable("Result", default=Any)
else:
    Result = TypeVar("Result")


POLL_S = 20e-6  # between two looks at a device


class Waitable(Protocol):
    """A transfer that was started: a Work, or several in turn."""

    def wait(self) -> None:
        """Waits until it is complete, or enqueued on a device; raises its error."""

    def wait_for_device(self) -> None:
        """Waits until it is complete on the device, too; raises its error."""


class Work(_core.Work, Generic[Result]):
    """A call that was started with async_op. Do not access its arrays until it is complete.

    `source` is the rank whose message a recv received; None for other calls, and before that.

    wait() and result() copy the result into an array that is not contiguous. On a device they
    return once the call is enqueued: later work on the current stream runs after it.
    """

    __slots__ = ()
    _result: Result
    _written: ArrayRef | None  # not contiguous: wait() copies to it
    _array: ArrayRef | None  # on a device

    def done(self) -> bool:
        """Whether the call is complete or failed."""
        return super().done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the call is complete.

        Args:
            timeout_s: time limit in seconds of this wait; None: none. After such a Timeout the call
                continues and can be waited for again.

        Raises:
            Timeout: the call is not complete in time.
            Error: the error of the call.
        """
        self.wait_for_call(limit(timeout_s))
        if self._array is not None:
            self.make_stream_wait(device_groups.stream(self._array.device, self._array.array))
        if self._written is not None:
            written, self._written = self._written, None
            written.finish()

    def wait_for_device(self) -> None:
        """wait(), and then until the device has completed the call.

        Raises:
            Error: the error of the call, also of a call that failed after it was enqueued.
        """
        self.wait()
        while not self.done():
            time.sleep(POLL_S)  # polls the device: Ctrl-C interrupts it
        self.wait_for_call(limit(None))

    def result(self) -> Result:
        """Waits, and returns what the call without async_op returns; raises its error."""
        self.wait()
        return self._result


def run(
    group: Group | None,
    call: _core.Call,
    source: Any,
    output: Any,
    result: Any,
    async_op: bool,
) -> Any:
    """Runs or starts a call that `_core.Call` does not run itself. Returns `result`, or a Work.

    These are: a call that torch's profiler records, one that is started, one on arrays that the
    core cannot read, and one whose default group is that of a thread, or missing, which raises.

    Args:
        group: None: the default group.
        call: what the core runs, without arrays.
        source: the array that the call reads, or a reference to it; None: none.
        output: the array that it writes, which may be `source`.
        result: what the call returns.
        async_op: whether to start it.
    """
    async_op = flag("async_op", async_op)
    profiler: Any = sys.modules.get(PROFILER)
    if profiler is not None and profiler._is_profiler_enabled:
        with profiler.record_function(f"pycomm:{call.operation}"):
            return _run(chosen(group), call, source, output, result, async_op)
    return _run(chosen(group), call, source, output, result, async_op)


_core.set_call_fallback(run)
_core.set_work_type(Work)
if PROFILER in sys.modules:
    _core.set_profiler(sys.modules[PROFILER])


def _run(
    group: Group, call: _core.Call, source: Any, output: Any, result: Any, async_op: bool
) -> Any:
    if async_op:
        work = call.start(group.core, source, output, None, result, None, None)
        if work is not None:
            return work
    elif call.run(group.core, source, output):
        return result
    return _run_described(group, call, source, output, result, async_op)


def _run_described(
    group: Group, call: _core.Call, source: Any, output: Any, result: Any, async_op: bool
) -> Any:
    """As run(), for arrays that the core cannot read itself: on a device, strided, of other kinds.

    Copies the result back where needed.
    """
    if source is None and output is None:
        arrays.view(None)  # raises: the caller passed None as the array
    read = None if source is None else arrays.view(source, write=source is output)
    written = read
    if output is not source:
        written = None if output is None else arrays.view(output, write=True)
    memory = read and read.memory, written and written.memory
    array = _on_device(read, written)
    core: _core.Collectives = group.core
    stream = 0
    if array is not None:
        core = device_groups.core(group, array.device, call)
        stream = device_groups.stream(array.device, array.array)
    if async_op:
        return call.start(core, *memory, stream, result, written, array)
    call.run(core, *memory, stream)
    if written is not None:
        written.finish()
    return result


def _on_device(source: ArrayRef | None, output: ArrayRef | None) -> ArrayRef | None:
    """The array on whose device the call runs; None: host memory."""
    if source is not None and output is not None and source.device != output.device:
        raise InvalidArgument(f"x is on {source.device}, but out is on {output.device}")
    array = source or output
    return None if array is None or array.device.kind == "cpu" else array


def limit(timeout_s: float | None) -> float:
    """A time limit as the core takes it: 0 for the group's."""
    return 0.0 if timeout_s is None else seconds("timeout_s", timeout_s)


def output(out: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """`out`, checked against `shape` and the dtype of `x`; a new array if it is None."""
    if out is None:
        return arrays.empty_like(x, shape)
    given = arrays.plain(out).shape
    if given != shape:
        raise InvalidArgument(f"invalid out: got shape {list(given)}, expected {list(shape)}")
    return out


def copy_if_overlapping(source: ArrayRef, target: ArrayRef, place: int | None) -> ArrayRef:
    """`source`, or a copy if it overlaps `target` in a way that the core does not allow.

    `place` is the offset in bytes in `target` at which the source may begin; None: no overlap.
    """
    if source.dtype != target.dtype:
        raise InvalidArgument(f"out has dtype {target.dtype}, but x has {source.dtype}")
    first, last = source.pointer, source.pointer + source.nbytes
    shared = first < target.pointer + target.nbytes and target.pointer < last
    if not shared or (place is not None and first == target.pointer + place):
        return source
    return arrays.copied(source)


def rows(x: Any, size: int, verb: str) -> tuple[int, ...]:
    """The shape of a row of `x`, which has one row for each of `size` ranks."""
    shape = tuple(x.shape)
    if not shape or shape[0] != size:
        raise InvalidArgument(
            f"{verb}: invalid x: got shape {list(shape)}, expected [{size}, ...], one row for each "
            "rank",
            op=verb,
        )
    return shape[1:]


def exchange_lengths(group: Group, x: Any, dtype: str, timeout_s: float | None) -> list[int]:
    """The length of each rank's `x`, by rank; all other dimensions are equal. Collective.

    Raises:
        Mismatch: on every rank: rows or dtypes differ.
    """
    shape = tuple(x.shape)
    if not shape:
        raise InvalidArgument("all_gather_v: invalid x: got a scalar, expected shape [n, ...]")
    row = zlib.crc32(repr((shape[1:], dtype)).encode())
    mine = np.array([shape[0], row, math.prod(shape[1:]), _core.DTYPES.index(dtype)], np.int64)
    every = np.empty((group.size, 4), np.int64)
    _core.Call("all_gather", timeout_s=timeout_s)(group, mine, every, None, False)
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


def check_list(out: Any, x: ArrayRef, size: int) -> None:
    """Checks a list of arrays for the ranks' results, of the kind and dtype of `x`."""
    if not isinstance(out, (list, tuple)) or len(out) != size:
        refuse("out", out, f"a list of {size} arrays, one for each rank")
    for one in out:
        found = arrays.view(one, write=True)
        kinds = arrays.is_torch(found.array), arrays.is_torch(x.array)
        if kinds[0] != kinds[1] or (found.dtype, found.device) != (x.dtype, x.device):
            raise InvalidArgument(
                f"invalid out: got a {type(one).__name__} of {found.dtype} on {found.device}, "
                f"expected the kind, dtype and device of x: {x.dtype} on {x.device}"
            )


def into_list(whole: ArrayRef, parts: list[Any], out: Any) -> ArrayRef:
    """The view `whole`; its finish() copies its `parts` to the arrays of the list `out`."""
    for one, part in zip(out, parts, strict=True):
        output(one, part, tuple(part.shape))
    return dataclasses.replace(whole, array=parts, target=list(out))
