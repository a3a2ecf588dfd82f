"""How a call is made: its arrays checked against each other, then run, or started as a Work.

The verbs themselves, with their arguments, are in collectives.py, which calls this file.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from pycomm import _core, arrays
from pycomm.arrays import View
from pycomm.errors import InvalidArgument
from pycomm.group import Group, default

__all__ = ["Work", "apart", "go", "limit", "output", "rows"]

# What the core's run() and start() take, up to the time limit.
Call: TypeAlias = tuple[str, str, str, int, int, int, int, int, str]


class Work:
    """A call under way. Its arrays must be left alone until it is over.

    A result for an array that is not contiguous is copied there by wait() or result().
    """

    __slots__ = ("_core", "_output", "_result")

    def __init__(self, core: _core.Work, output: View | None, result: Any) -> None:
        self._core = core
        self._output = output
        self._result = result

    def done(self) -> bool:
        """Whether the call is over, well or badly."""
        return self._core.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the call is over; raises its error, or Timeout after `timeout_s` seconds.

        After such a Timeout the call goes on, and can be waited for again.
        """
        self._core.wait(limit(timeout_s))
        output, self._output = self._output, None
        if output is not None:
            output.finish()

    def result(self) -> Any:
        """Waits, and gives what the call without async_op returns."""
        self.wait()
        return self._result


def go(
    group: Group | None,
    call: Call,
    timeout_s: float | None,
    async_op: bool,
    source: View | None,
    output: View | None,
    result: Any,
) -> Any:
    """Makes the call, or starts it, and copies back where that is needed."""
    core = (group or default())._core
    limit_s = 0.0 if timeout_s is None else limit(timeout_s)
    if async_op:
        return Work(core.start((source, output), *call, limit_s), output, result)
    core.run(*call, limit_s)
    if output is not None and output.target is not None:
        output.finish()
    return result


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


def apart(source: View, target: View, place: int) -> View:
    """`source`, or a copy of it where it shares memory with `target` other than as the core allows.

    `place` is how many bytes after the target's first the source may begin.
    """
    if source.dtype != target.dtype:
        raise InvalidArgument(f"out is of dtype {target.dtype} and x of {source.dtype}")
    first, last = source.pointer, source.pointer + source.nbytes
    shared = first < target.pointer + target.nbytes and target.pointer < last
    return arrays.copied(source) if shared and first != target.pointer + place else source


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
