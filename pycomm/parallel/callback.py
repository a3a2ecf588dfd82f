"""pycomm.make_allreduce_cb: averages gradients by a callback on parameters, without a wrapper.

Packs gradients as they are computed and exchanges them during the backward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from pycomm import _core
from pycomm._arguments import refuse
from pycomm._core_api.calls import Work
from pycomm._training.communicators import CommunicatorPool, tag_of
from pycomm.errors import Unsupported
from pycomm.group import Group

PACK_BYTES = 4 << 20  # a pack is sent at this size


def make_allreduce_cb(op: str, group: Group | None = None) -> Callable[[Tensor], None]:
    """A callback for `p.register_post_accumulate_grad_hook(cb)`; one serves all parameters.

    After backward() every p.grad is the sum or mean over all ranks. Gradients must be computed in
    the same order on all ranks, as with identical models.

    Args:
        op: "sum" or "mean" (or "avg").
        group: the group to call in; None: the default group.

    Returns:
        The callback. It raises Unsupported for sparse gradients, and errors as pycomm.all_reduce.

    Raises:
        InvalidArgument: `op` is invalid.
    """
    name = _core.reduce_op_name(op)
    if name not in ("sum", "avg"):
        refuse("op", op, '"sum" or "mean"')
    packer = _Packer(CommunicatorPool(group, 1), name)
    return packer.take


class _Packer:
    """Gradients that wait to be sent, and packs in transit."""

    def __init__(self, pool: CommunicatorPool, op: str) -> None:
        self._pool, self._op = pool, op
        self._waiting: list[Tensor] = []
        self._passes = 0
        # By identity, the numbers of parameters in the order of their first gradients.
        self._known: dict[int, int] = {}
        self._numbers: list[int] = []
        self._bytes = 0
        self._sent: list[tuple[list[Tensor], Tensor, Work]] = []
        self._running = False

    def take(self, parameter: Tensor) -> None:
        """The callback."""
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            raise Unsupported(
                "make_allreduce_cb does not support sparse gradients: use DataParallel"
            )
        if not self._running:
            self._running = True
            self._passes += 1
            torch.autograd.Variable._execution_engine.queue_callback(self._flush)
        if self._waiting and self._waiting[0].dtype != gradient.dtype:
            self._send()
        self._waiting.append(gradient)
        self._numbers.append(self._known.setdefault(id(parameter), len(self._known)))
        self._bytes += gradient.nbytes
        if self._bytes >= PACK_BYTES:
            self._send()

    def _send(self) -> None:
        check = zlib.crc32(repr(self._numbers).encode())
        self._pool.tag, self._numbers = tag_of(self._passes, check), []
        flat = torch.cat([gradient.reshape(-1) for gradient in self._waiting])
        self._sent.append((self._waiting, flat, self._pool.all_reduce(flat, self._op)))
        self._waiting, self._bytes = [], 0

    def _flush(self) -> None:
        try:
            if self._waiting:
                self._send()
            for gradients, flat, work in self._sent:
                work.wait()
                parts = torch.split(flat, [gradient.numel() for gradient in gradients])
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.copy_(part.view(gradient.shape))
        finally:
            self._waiting, self._bytes, self._sent, self._running = [], 0, [], False
            self._numbers = []
