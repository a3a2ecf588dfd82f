"""Communication with gradients: a model split over processes, or a loss over all ranks' outputs.

    rank 0   feature = lower(x);  sent = remote_send(feature, 1);         sent.backward()
                                        | shape, dtype, elements              ^ gradient
    rank 1                        feature = remote_recv(0);  loss(...).backward()

`all_reduce` and `all_gather` return new tensors. Their backward pass gives each rank the gradient
of the sum of all ranks' losses, as in torch.distributed.nn.functional: it is a collective call, of
all_reduce or reduce_scatter. DataParallel's mean over the ranks turns it into the gradient of the
mean loss. Every rank runs the same passes in the same order, so the input requires a gradient on
every rank or on none. Gradients of gradients are supported.

Source of the idea: MegEngine's distributed.functional.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pycomm import _core, collectives
from pycomm._arguments import also_named, integer, refuse
from pycomm._core_api import arrays
from pycomm.default_group import chosen
from pycomm.errors import InvalidArgument, Mismatch
from pycomm.group import Group

if TYPE_CHECKING:
    from pycomm._core_api.annotations import Op

__all__ = ["all_gather", "all_reduce", "remote_recv", "remote_send"]

MOST_DIMENSIONS = 8
Call = Callable[[Tensor], Tensor]
FORWARD, BACKWARD = 0xFFFFFF01, 0xFFFFFF02  # tags


def all_reduce(x: Tensor, op: Op = "sum", *, group: Group | None = None) -> Tensor:
    """The sum or mean of `x` over all ranks, with gradients. `x` is unchanged. Collective.

    Args:
        x: a tensor of floats in host memory or on a CUDA device, of any shape; the same count and
            dtype on every rank.
        op: "sum" or "mean" (or "avg").
        group: the group to call in, also in the backward pass; None: the default group.

    Returns:
        A new tensor of the shape, dtype and device of `x`. Its backward pass reduces the gradients
        with the same `op`.

    Raises:
        InvalidArgument: `op` is another one.
        Error: as pycomm.all_reduce, also in the backward pass.
    """
    arrays.check_tensor("x", x)
    if _core.reduce_op_name(op) not in ("sum", "avg"):
        refuse("op", op, '"sum" or "mean"')
    group = chosen(group)

    def reduced(x: Tensor) -> Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(y, op, group=group)
        return y

    return _linear(x, reduced, reduced)


def all_gather(x: Tensor, *, group: Group | None = None) -> Tensor:
    """Stacks the ranks' tensors on every rank, with gradients: row i is rank i's `x`. Collective.

    `.flatten(0, 1)` of the result concatenates batches.

    Args:
        x: a tensor of floats in host memory or on a CUDA device, of any shape; the same count and
            dtype on every rank.
        group: the group to call in, also in the backward pass; None: the default group.

    Returns:
        A new tensor of shape [size, *x.shape]. Its backward pass adds the ranks' gradients of row
        i on rank i (reduce_scatter).

    Raises:
        Error: as pycomm.all_gather, also in the backward pass.
    """
    arrays.check_tensor("x", x)
    group = chosen(group)

    def gathered(x: Tensor) -> Tensor:
        y: Tensor = collectives.all_gather(x.contiguous(), group=group)
        return y

    def scattered(x: Tensor) -> Tensor:
        y: Tensor = collectives.reduce_scatter(x.contiguous(), group=group)
        return y

    return _linear(x, gathered, scattered)


@also_named(dest_rank="dst")
def remote_send(x: Tensor, dst: int, *, group: Group | None = None) -> Tensor:
    """Sends `x` to rank `dst`, which calls remote_recv; returns a handle.

    handle.backward() waits for the gradient from `dst` and continues the backward pass with it. The
    handle is a scalar 0, so it can be added to a loss of this rank.

    Args:
        x: a tensor of at most 8 dimensions, in host memory or on a CUDA device; it is sent through
            host memory, with its shape and dtype. Its gradient is on the device of `x`.
        dst: another rank.
        group: the group of `dst`; None: the default group.

    Returns:
        A scalar tensor of the dtype and device of `x`.

    Raises:
        InvalidArgument: `x` has too many dimensions, or `dst` is this rank.
        Unsupported: pycomm does not send this dtype, layout or device.
        Error: as pycomm.send.
    """
    own, dst = chosen(group), integer("dst", dst)
    arrays.check_tensor("x", x)
    if own.rank == dst or x.dim() > MOST_DIMENSIONS:
        raise InvalidArgument(
            f"remote_send: got {x.dim()} dimensions from rank {own.rank} to {dst}, expected at "
            f"most {MOST_DIMENSIONS} dimensions and another rank"
        )
    handle: Tensor = _Send.apply(x, dst, own)  # type: ignore[no-untyped-call]  # torch's own
    return handle


@also_named(src_rank="src")
def remote_recv(
    src: int,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    *,
    group: Group | None = None,
) -> Tensor:
    """Receives the tensor that rank `src` sends with remote_send, in host memory.

    The backward pass sends the gradient to `src`, which waits for it if its tensor requires one:
    use the result in exactly one loss. `.to(device)` moves the tensor, and its gradient back.

    Args:
        src: another rank.
        shape, dtype: what `src` is expected to send; None: anything.
        group: the group of `src`; None: the default group.

    Returns:
        A tensor of the shape and dtype that were sent.

    Raises:
        Mismatch: `src` sent another shape or dtype. The tensor is discarded, and a backward pass of
            `src` would wait in vain.
        Error: as pycomm.recv.
    """
    own = chosen(group)
    if shape is not None and not isinstance(shape, (list, tuple)):
        refuse("shape", shape, "a list of lengths")
    sizes_wanted = None if shape is None else tuple(integer("shape", n, 0) for n in shape)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        refuse("dtype", dtype, "a torch dtype")
    words = torch.empty(3 + MOST_DIMENSIONS, dtype=torch.int64)
    collectives.recv(words, src, FORWARD, group=own)
    kind, dimensions, needs_gradient, *sizes = words.tolist()
    x = torch.empty(sizes[:dimensions], dtype=getattr(torch, _core.DTYPES[kind]))
    collectives.recv(x, src, FORWARD, group=own)
    wanted = tuple(x.shape) if sizes_wanted is None else sizes_wanted, dtype or x.dtype
    if wanted != (tuple(x.shape), x.dtype):
        raise Mismatch(
            f"remote_recv: rank {src} sent {tuple(x.shape)} of {x.dtype}, expected {wanted[0]} of "
            f"{wanted[1]}"
        )
    if not needs_gradient:
        return x
    received: Tensor = _Received.apply(  # type: ignore[no-untyped-call]  # torch's own
        x.requires_grad_(), src, own
    )
    return received


def _linear(x: Tensor, call: Call, transposed: Call) -> Tensor:
    """call(x), with transposed(gradient) as its backward pass."""
    y: Tensor = _Linear.apply(x, call, transposed)  # type: ignore[no-untyped-call]  # torch's own
    return y


class _Linear(torch.autograd.Function):
    """A collective that is linear in its input; its gradient is linear, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, transposed: Call) -> Tensor:
        ctx.calls = transposed, call
        return call(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _linear(gradients[0], *ctx.calls), None, None


class _Send(torch.autograd.Function):
    """Forward: x -> 0. Backward: receives the gradient from the other rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dst: int, group: Group) -> Tensor:
        ctx.dst, ctx.group = dst, group
        ctx.save_for_backward(x)
        there = arrays.in_host_memory(x)  # raises before anything is sent
        kind = _core.DTYPES.index(arrays.view(there).dtype)
        words = torch.zeros(3 + MOST_DIMENSIONS, dtype=torch.int64)
        words[:3] = torch.tensor([kind, x.dim(), ctx.needs_input_grad[0]])
        words[3 : 3 + x.dim()] = torch.tensor(x.shape)
        collectives.send(words, dst, FORWARD, group=group)
        collectives.send(there, dst, FORWARD, group=group)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        gradient = torch.empty(x.shape, dtype=x.dtype)
        collectives.recv(gradient, ctx.dst, BACKWARD, group=ctx.group)
        return gradient.to(x.device), None, None


class _Received(torch.autograd.Function):
    """Forward: x -> x. Backward: sends the gradient to the other rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int, group: Group) -> Tensor:
        ctx.src, ctx.group = src, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient = arrays.in_host_memory(gradients[0])
        collectives.send(gradient, ctx.src, BACKWARD, group=ctx.group)
        return None, None, None
