"""Tensors between ranks with gradients back: a model that lies on several processes.

    rank 0   feature = lower(x);  sent = remote_send(feature, 1);         sent.backward()
                                        | shape, dtype, elements              ^ gradient
    rank 1                        feature = remote_recv(0);  loss(...).backward()

Called by users as pycomm.remote_send and pycomm.remote_recv. Source of the idea: MegEngine's
distributed.functional.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pycomm import _core, arrays, collectives
from pycomm.errors import InvalidArgument
from pycomm.group import Group, default

__all__ = ["remote_recv", "remote_send"]

MOST_DIMENSIONS = 8
FORWARD, BACKWARD = 0xFFFFFF01, 0xFFFFFF02  # tags


def remote_send(x: Tensor, dst: int, *, group: Group | None = None) -> Tensor:
    """Sends `x` to rank `dst`, which calls remote_recv; returns a handle.

    handle.backward() waits for the gradient from there and goes on with it through what made `x`.
    The handle is a 0, so it can be added to a loss of this rank.

    Args:
        x: a tensor of at most 8 dimensions, in host memory or on a CUDA device: a copy in host
            memory is sent, with its shape and dtype. The gradient is given on the device of `x`.
        dst: another rank.
        group: of `dst`; None is the default group.

    Raises:
        InvalidArgument: too many dimensions, or this very rank.
        Unsupported: a dtype, layout or device that pycomm does not send.
    """
    own = group or default()
    if own.rank == dst or x.dim() > MOST_DIMENSIONS:
        raise InvalidArgument(
            f"remote_send of {x.dim()} dimensions from rank {own.rank} to {dst}: at most "
            f"{MOST_DIMENSIONS}, and another rank"
        )
    handle: Tensor = _Send.apply(x, dst, own)  # type: ignore[no-untyped-call]  # torch's own
    return handle


def remote_recv(src: int, *, group: Group | None = None) -> Tensor:
    """What rank `src` sends by remote_send, in host memory wherever it was there; `.to(device)`
    moves it, and its gradient back. That is sent to `src` in the backward pass, which waits for it
    if the tensor that it sent needs one: use the result once in a loss.

    Args:
        src: another rank.
        group: of `src`; None is the default group.
    """
    own = group or default()
    words = torch.empty(3 + MOST_DIMENSIONS, dtype=torch.int64)
    collectives.recv(words, src, FORWARD, group=own)
    kind, dimensions, needs_gradient, *shape = words.tolist()
    dtype = getattr(torch, _core.DTYPES[kind])
    x = torch.empty(shape[:dimensions], dtype=dtype)
    collectives.recv(x, src, FORWARD, group=own)
    if not needs_gradient:
        return x
    received: Tensor = _Received.apply(  # type: ignore[no-untyped-call]  # torch's own
        x.requires_grad_(), src, own
    )
    return received


class _Send(torch.autograd.Function):
    """x -> 0; its gradient comes from the other rank."""

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
    """x -> x; its gradient goes to the other rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int, group: Group) -> Tensor:
        ctx.src, ctx.group = src, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient = arrays.in_host_memory(gradients[0])
        collectives.send(gradient, ctx.src, BACKWARD, group=ctx.group)
        return None, None, None
