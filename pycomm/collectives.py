"""The collective calls. Every rank of a group makes the same ones in the same order.

An array is a torch tensor on the CPU, a NumPy array, or anything with NumPy's interface, of any
shape and strides. Each function takes

    group      the group to call in; None: the default group
    async_op   True: returns a Work at once, which gives the result later
    timeout_s  limit of this call in seconds; None: the group's

and raises pycomm.errors: InvalidArgument and Unsupported before anything moves, Mismatch when the
ranks disagree (nothing has changed), Timeout, PeerLost and GroupBroken when the group has failed;
what the call was to write is then undefined.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pycomm import _core, arrays, calls
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import Group, default

__all__ = [
    "algorithms",
    "all_gather",
    "all_gather_object",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "empty",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]


def all_reduce(
    x: Any,
    op: str = "sum",
    *,
    algorithm: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Reduces `x` over all ranks, in place; every rank gets the same bits. Returns `x`.

    Args:
        x: the array, of the same count and dtype on every rank.
        op: "sum", "avg", "product", "min", "max", "band", "bor" or "bxor". 16-bit floats are added
            in float32; avg is for floats, the bit operations are for integers and bool.
        algorithm: one of algorithms(), to force it.
    """
    v = arrays.view(x, write=True)
    call = ("all_reduce", v.dtype, op, v.pointer, v.pointer, v.count, 0, 0, algorithm or "auto")
    return calls.go(group, call, timeout_s, async_op, v, v, x)


def broadcast(
    x: Any,
    src: int = 0,
    *,
    algorithm: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Makes `x` on every rank what it is on rank `src`, in place. Returns `x`."""
    v = arrays.view(x, write=True)
    call = ("broadcast", v.dtype, "sum", 0, v.pointer, v.count, src, 0, algorithm or "auto")
    return calls.go(group, call, timeout_s, async_op, v, v, x)


def all_gather(
    x: Any,
    out: Any = None,
    *,
    algorithm: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Puts the ranks' arrays one after another: `out[i]` is rank i's `x`.

    Args:
        x: the array, of the same count and dtype on every rank.
        out: of shape [size, *x.shape]; made if None. `x` may be out[rank].

    Returns:
        out.
    """
    group = group or default()
    x = arrays.plain(x)
    shape = (group.size, *x.shape)
    out = calls.output(out, x, shape)
    source, target = arrays.view(x), arrays.view(out, write=True)
    source = calls.apart(source, target, group.rank * source.nbytes)
    places = source.pointer, target.pointer
    call = ("all_gather", target.dtype, "sum", *places, source.count, 0, 0, algorithm or "auto")
    return calls.go(group, call, timeout_s, async_op, source, target, out)


def reduce_scatter(
    x: Any,
    op: str = "sum",
    out: Any = None,
    *,
    algorithm: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Reduces over all ranks and leaves each its own row: rank i gets the reduction of `x[i]`.

    Args:
        x: of shape [size, *shape]; it does not change, except where `out` is a part of it.
        op: as in all_reduce.
        out: of shape `shape`; made if None. It may be x[rank].

    Returns:
        out.
    """
    group = group or default()
    x = arrays.plain(x)
    shape = tuple(x.shape)
    if not shape or shape[0] != group.size:
        raise InvalidArgument(
            f"reduce_scatter takes x of shape [size, ...], one row for each of the {group.size} "
            f"ranks, not {list(shape)}",
            op="reduce_scatter",
        )
    out = calls.output(out, x, shape[1:])
    source, target = arrays.view(x), arrays.view(out, write=True)
    source = calls.apart(source, target, -group.rank * target.nbytes)
    places = source.pointer, target.pointer
    call = ("reduce_scatter", target.dtype, op, *places, target.count, 0, 0, algorithm or "auto")
    return calls.go(group, call, timeout_s, async_op, source, target, out)


def send(
    x: Any,
    dst: int,
    tag: int = 0,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Sends `x` to rank `dst`, which calls recv with the same tag, count and dtype."""
    v = arrays.view(x)
    call = ("send", v.dtype, "sum", v.pointer, 0, v.count, dst, _tag(tag), "auto")
    return calls.go(group, call, timeout_s, async_op, v, None, None)


def recv(
    x: Any,
    src: int,
    tag: int = 0,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Receives into `x` what rank `src` sends with the same tag. Returns `x`."""
    v = arrays.view(x, write=True)
    call = ("recv", v.dtype, "sum", 0, v.pointer, v.count, src, _tag(tag), "auto")
    return calls.go(group, call, timeout_s, async_op, v, v, x)


def barrier(
    *, group: Group | None = None, async_op: bool = False, timeout_s: float | None = None
) -> Any:
    """Returns when every rank has called it."""
    call = ("barrier", "uint8", "sum", 0, 0, 0, 0, 0, "auto")
    return calls.go(group, call, timeout_s, async_op, None, None, None)


def algorithms() -> tuple[str, ...]:
    """The algorithms that can be forced by name."""
    return tuple(name for name in _core.ALGORITHMS if name != "auto")


def _tag(tag: int) -> int:
    if not 0 <= tag < 1 << 32:
        raise InvalidArgument(f"tag is {tag}; it must be from 0 to 2^32 - 1")
    return tag


# The verbs of the contract that are not built yet, with what to use until then.


def _unsupported(verb: str, instead: str) -> NoReturn:
    raise Unsupported(f"{verb} is not built yet; {instead}", op=verb)


def reduce(x: Any, dst: int = 0, op: str = "sum", **_: Any) -> NoReturn:
    """Not built yet."""
    _unsupported("reduce", "all_reduce gives the same on every rank")


def gather(x: Any, dst: int = 0, **_: Any) -> NoReturn:
    """Not built yet."""
    _unsupported("gather", "all_gather gives the same on every rank")


def scatter(x: Any, src: int = 0, out: Any = None, **_: Any) -> NoReturn:
    """Not built yet."""
    _unsupported("scatter", "broadcast the whole and take a row, or send to each rank")


def all_to_all(x: Any, out: Any = None, **_: Any) -> NoReturn:
    """Not built yet."""
    _unsupported("all_to_all", "all_gather and take a column, or send to each rank")


def all_gather_v(x: Any, out: Any = None, **_: Any) -> NoReturn:
    """Not built yet."""
    _unsupported("all_gather_v", "all_gather arrays padded to one length")


def all_gather_object(value: Any, **_: Any) -> NoReturn:
    """Not built yet."""
    _unsupported("all_gather_object", "all_gather arrays")


def empty(shape: Any, dtype: Any, shared: bool = True) -> NoReturn:
    """Not built yet."""
    _unsupported("empty", "any array can be passed to a collective")
