"""The collective calls. Every rank of a group makes the same calls in the same order.

An array is a torch tensor, a NumPy array, or any object with the array interface, the buffer
protocol or DLPack, of any shape and strides. CuPy's arrays must be contiguous. These parameters are
common to all calls:

    algorithm  one of algorithms(), to force it; None: chosen by size and number of ranks
    group      the group to call in; None: the default group
    async_op   True: returns a Work at once, which gives the result later
    timeout_s  time limit of this call in seconds; None: the group's

After Timeout, PeerLost and GroupBroken the contents of the call's output are undefined.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, overload

from pycomm import _core
from pycomm._arguments import integer, refuse
from pycomm._core_api import arrays, calls
from pycomm._core_api.calls import Work
from pycomm._quantize import Quantize, QuantizeState
from pycomm._quantize import all_reduce as quantized_all_reduce
from pycomm.default_group import chosen
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import Group

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pycomm._core_api.annotations import Array, AsyncCalls, AsyncMessages, Calls, Messages, Op

_SUM = _core.Call("all_reduce")  # an all_reduce with default arguments
SUM = "sum"  # of which Python has one object, as of all names


@overload
def all_reduce(
    x: Array,
    op: Op = "sum",
    *,
    compression: Quantize | None = None,
    state: QuantizeState | None = None,
    **options: Unpack[Calls],
) -> Array: ...
@overload
def all_reduce(x: Array, op: Op = "sum", **options: Unpack[AsyncCalls]) -> Work[Array]: ...
def all_reduce(
    x: Any,
    op: Op = "sum",
    *,
    algorithm: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
    compression: Quantize | None = None,
    state: QuantizeState | None = None,
) -> Any:
    """Reduces `x` over all ranks, in place; every rank gets the same bits. Returns `x`.

    Args:
        x: the array, of the same count and dtype on every rank.
        op: "sum", "avg" (or "mean"), "product" (or "prod"), "min", "max", "band", "bor", "bxor", or
            one of torch's ReduceOp. 16-bit floats are added in float32. "avg" takes floats only;
            bit operations take integers and bool.
        algorithm: one of algorithms(), to force it; None: chosen by size and number of ranks.
        group: the group to call in; None: the default group.
        async_op: True: returns a Work at once instead of the result.
        timeout_s: time limit in seconds; None: the group's.
        compression: a pycomm.Quantize, to send few bits for each value; None: exact. `x` is then
            float32, float16 or bfloat16 in host memory, or a torch tensor on a GPU; `op` is "sum"
            or "mean", without `algorithm` and `async_op`. A value that is not finite makes all that
            share its levels NaN.
        state: of compression.state(), one for each array: adds what earlier calls lost. If the call
            fails, or a sum is not finite, it stays as it was. None: nothing is added.

    Raises:
        InvalidArgument, Unsupported: an argument or array is invalid; no data was sent.
        Mismatch: the ranks' calls differ; no array changed.
        Timeout, PeerLost, GroupBroken: the group failed; `x` is undefined, but with `compression`
            it is unchanged.
    """
    if compression is not None or state is not None:
        if algorithm is not None or async_op:
            raise Unsupported("all_reduce: compression excludes algorithm and async_op")
        return quantized_all_reduce(x, op, compression, state, chosen(group), timeout_s)
    if op is SUM and algorithm is None and timeout_s is None:  # an array has no truth
        call = _SUM
    else:
        call = _core.Call("all_reduce", op=op, algorithm=algorithm, timeout_s=timeout_s)
    return call(group, x, x, x, async_op)


@overload
def reduce(x: Array, dst: int = 0, op: Op = "sum", **options: Unpack[Calls]) -> Array: ...
@overload
def reduce(
    x: Array, dst: int = 0, op: Op = "sum", **options: Unpack[AsyncCalls]
) -> Work[Array]: ...
def reduce(
    x: Any,
    dst: int = 0,
    op: Op = "sum",
    *,
    algorithm: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Reduces `x` over all ranks, in place on rank `dst`; unchanged on the others. Returns `x`.

    Args:
        x: the array, of the same count and dtype on every rank.
        dst: the rank that gets the result.
        op: as in all_reduce.
    """
    group = chosen(group)
    dst = integer("dst", dst)
    call = _core.Call("reduce", op=op, peer=dst, algorithm=algorithm, timeout_s=timeout_s)
    return call(group, x, x if group.rank == dst else None, x, async_op)


@overload
def broadcast(x: Array, src: int = 0, **options: Unpack[Calls]) -> Array: ...
@overload
def broadcast(x: Array, src: int = 0, **options: Unpack[AsyncCalls]) -> Work[Array]: ...
def broadcast(
    x: Any,
    src: int = 0,
    *,
    algorithm: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Copies `x` of rank `src` into `x` of every rank, in place. Returns `x`.

    Args:
        x: the array, of the same count and dtype on every rank.
        src: the rank whose elements are sent.
    """
    call = _core.Call("broadcast", peer=src, algorithm=algorithm, timeout_s=timeout_s)
    return call(group, None, x, x, async_op)


@overload
def all_gather(x: Array, out: Array | None = None, **options: Unpack[Calls]) -> Array: ...
@overload
def all_gather(
    x: Array, out: Array | None = None, **options: Unpack[AsyncCalls]
) -> Work[Array]: ...
def all_gather(
    x: Any,
    out: Any = None,
    *,
    algorithm: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Concatenates the ranks' arrays on every rank: `out[i]` is rank i's `x`.

    Args:
        x: the array, of the same count and dtype on every rank.
        out: of shape [size, *x.shape]; created if None. `x` may be out[rank].

    Returns:
        out.
    """
    call = _core.Call("all_gather", algorithm=algorithm, timeout_s=timeout_s)
    if async_op is False and call.run_rows(group, x, out):
        return out
    group = chosen(group)
    if type(x) is list or type(x) is tuple:
        refuse("x", x, "an array; the result is returned: out = pycomm.all_gather(x)")
    x = arrays.plain(x)
    shape = (group.size, *x.shape)
    out = calls.output(out, x, shape)
    source, target = arrays.view(x), arrays.view(out, write=True)
    source = calls.copy_if_overlapping(source, target, group.rank * source.nbytes)
    return call(group, source, target, out, async_op)


@overload
def gather(
    x: Array, dst: int = 0, out: Array | None = None, **options: Unpack[Calls]
) -> Array | None: ...
@overload
def gather(
    x: Array, dst: int = 0, out: Array | None = None, **options: Unpack[AsyncCalls]
) -> Work[Array | None]: ...
def gather(
    x: Any,
    dst: int = 0,
    out: Any = None,
    *,
    algorithm: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Concatenates the ranks' arrays on rank `dst` alone.

    Args:
        x: the array, of the same count and dtype on every rank.
        dst: the rank that gets the result.
        out: on `dst`: of shape [size, *x.shape], created if None; `x` may be out[dst]. None on the
            other ranks.

    Returns:
        out on `dst`, None elsewhere.
    """
    dst = integer("dst", dst)
    call = _core.Call("gather", peer=dst, algorithm=algorithm, timeout_s=timeout_s)
    if async_op is False and call.run_rows(group, x, out):
        return out
    group = chosen(group)
    x = arrays.plain(x)
    source, target = arrays.view(x), None
    if group.rank == dst:
        out = calls.output(out, x, (group.size, *x.shape))
        target = arrays.view(out, write=True)
        source = calls.copy_if_overlapping(source, target, dst * source.nbytes)
    elif out is not None:
        raise InvalidArgument(
            f"gather: out is for rank {dst} only; pass None on other ranks", op="gather"
        )
    return call(group, source, target, out, async_op)


@overload
def all_gather_v(
    x: Array, out: list[Array] | None = None, **options: Unpack[Calls]
) -> list[Array]: ...
@overload
def all_gather_v(
    x: Array, out: list[Array] | None = None, **options: Unpack[AsyncCalls]
) -> Work[list[Array]]: ...
def all_gather_v(
    x: Any,
    out: Any = None,
    *,
    algorithm: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """all_gather for arrays that may differ in their first dimension.

    The ranks exchange the lengths first, before the call returns, also with async_op.

    Args:
        x: of shape [n, *row]; row and dtype are the same on every rank.
        out: a list of arrays, out[i] of the shape of rank i's `x`; created if None.

    Returns:
        out; if it was created, its arrays are consecutive slices of one array.

    Raises:
        Mismatch: rows or dtypes differ.
    """
    group = chosen(group)
    x = arrays.plain(x)
    source = arrays.view(x)
    if out is not None:
        calls.check_list(out, source, group.size)
    lengths = calls.exchange_lengths(group, x, source.dtype, timeout_s)
    whole = arrays.empty_like(x, (sum(lengths), *x.shape[1:]))
    target, parts = arrays.view(whole), arrays.parts(whole, lengths)
    if out is not None:
        target = calls.into_list(target, parts, out)
    width = math.prod(x.shape[1:])
    counts = [length * width for length in lengths]
    call = _core.Call("all_gather", counts=counts, algorithm=algorithm, timeout_s=timeout_s)
    return call(group, source, target, parts if out is None else out, async_op)


@overload
def reduce_scatter(
    x: Array, op: Op = "sum", out: Array | None = None, **options: Unpack[Calls]
) -> Array: ...
@overload
def reduce_scatter(
    x: Array, op: Op = "sum", out: Array | None = None, **options: Unpack[AsyncCalls]
) -> Work[Array]: ...
def reduce_scatter(
    x: Any,
    op: Op = "sum",
    out: Any = None,
    *,
    algorithm: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Reduces over all ranks and scatters the result: rank i gets the reduction of `x[i]`.

    Args:
        x: of shape [size, *shape]; unchanged, except where `out` is a slice of it.
        op: as in all_reduce.
        out: of shape `shape`; created if None. It may be x[rank].

    Returns:
        out.
    """
    call = _core.Call("reduce_scatter", op=op, algorithm=algorithm, timeout_s=timeout_s)
    if async_op is False and call.run_rows(group, x, out):
        return out
    group = chosen(group)
    x = arrays.plain(x)
    out = calls.output(out, x, calls.rows(x, group.size, "reduce_scatter"))
    source, target = arrays.view(x), arrays.view(out, write=True)
    source = calls.copy_if_overlapping(source, target, -group.rank * target.nbytes)
    return call(group, source, target, out, async_op)


@overload
def scatter(
    x: Array | None, src: int = 0, out: Array | None = None, **options: Unpack[Calls]
) -> Array: ...
@overload
def scatter(
    x: Array | None, src: int = 0, out: Array | None = None, **options: Unpack[AsyncCalls]
) -> Work[Array]: ...
def scatter(
    x: Any,
    src: int = 0,
    out: Any = None,
    *,
    algorithm: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Sends each rank its row of rank `src`'s `x`: rank i gets x[i].

    Args:
        x: of shape [size, *shape]. On ranks other than `src` it gives only shape and dtype, and may
            be None if `out` is given.
        src: the rank whose rows are sent.
        out: of shape `shape`; created if None. On `src` it may be x[src].

    Returns:
        out.
    """
    src = integer("src", src)
    call = _core.Call("scatter", peer=src, algorithm=algorithm, timeout_s=timeout_s)
    if async_op is False and call.run_rows(group, x, out):
        return out
    group = chosen(group)
    root = group.rank == src
    if x is None and (root or out is None):
        raise InvalidArgument(
            f"scatter: rank {src} must pass x, the others x or out (for shape and dtype)",
            op="scatter",
        )
    if x is not None:
        x = arrays.plain(x)
        out = calls.output(out, x, calls.rows(x, group.size, "scatter"))
    source, target = arrays.view(x) if root else None, arrays.view(out, write=True)
    if source:
        source = calls.copy_if_overlapping(source, target, -src * target.nbytes)
    return call(group, source, target, out, async_op)


@overload
def all_to_all(x: Array, out: Array | None = None, **options: Unpack[Calls]) -> Array: ...
@overload
def all_to_all(
    x: Array, out: Array | None = None, **options: Unpack[AsyncCalls]
) -> Work[Array]: ...
def all_to_all(
    x: Any,
    out: Any = None,
    *,
    algorithm: str | None = None,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Sends a row to every rank: out[i] on rank r is rank i's x[r].

    Args:
        x: of shape [size, *shape]; unchanged, except where it shares memory with `out`.
        out: of the shape of `x`; created if None.

    Returns:
        out.
    """
    call = _core.Call("all_to_all", algorithm=algorithm, timeout_s=timeout_s)
    if async_op is False and call.run_rows(group, x, out):
        return out
    group = chosen(group)
    x = arrays.plain(x)
    calls.rows(x, group.size, "all_to_all")
    out = calls.output(out, x, tuple(x.shape))
    source, target = arrays.view(x), arrays.view(out, write=True)
    source = calls.copy_if_overlapping(source, target, None)
    return call(group, source, target, out, async_op)


@overload
def send(x: Array, dst: int, tag: int = 0, **options: Unpack[Messages]) -> None: ...
@overload
def send(x: Array, dst: int, tag: int = 0, **options: Unpack[AsyncMessages]) -> Work[None]: ...
def send(
    x: Any,
    dst: int,
    tag: int = 0,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Sends `x` to rank `dst`, which calls recv with the same tag, count and dtype.

    Blocks while `dst` buffers more than 64 MiB of this rank's messages that it has not received.

    Args:
        x: the array.
        dst: the rank that receives it.
        tag: 0 to 2^32 - 1; distinguishes messages between the same two ranks.
    """
    call = _core.Call("send", peer=dst, tag=tag, timeout_s=timeout_s)
    return call(group, x, None, None, async_op)


@overload
def recv(x: Array, src: int, tag: int = 0, **options: Unpack[Messages]) -> Array: ...
@overload
def recv(x: Array, src: int, tag: int = 0, **options: Unpack[AsyncMessages]) -> Work[Array]: ...
def recv(
    x: Any,
    src: int,
    tag: int = 0,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Receives into `x` the message that rank `src` sends with the same tag. Returns `x`.

    Args:
        x: the array to write, of the sender's count and dtype.
        src: the rank that sends; -1: any rank.
        tag: as in send.
    """
    call = _core.Call("recv", peer=src, tag=tag, timeout_s=timeout_s)
    return call(group, None, x, x, async_op)


@overload
def barrier(**options: Unpack[Messages]) -> None: ...
@overload
def barrier(**options: Unpack[AsyncMessages]) -> Work[None]: ...
def barrier(
    *, group: Group | None = None, async_op: bool = False, timeout_s: float | None = None
) -> Any:
    """Returns after every rank has called it."""
    call = _core.Call("barrier", timeout_s=timeout_s)
    return call(group, None, None, None, async_op)


def algorithms() -> tuple[str, ...]:
    """The algorithm names that a call's `algorithm` accepts."""
    return tuple(name for name in _core.ALGORITHMS if name != "auto")
