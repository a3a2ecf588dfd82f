"""DGC and quantized gradients as communication hooks of torch's DistributedDataParallel."""

# No `from __future__ import annotations`: torch checks the annotations of a hook.
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs hide it

from pycomm import collectives
from pycomm._arguments import instance
from pycomm.compress.compressor import Compressor
from pycomm.compress.dgc import DGC, compressor_of
from pycomm.compress.gradient_exchange import GradientExchange
from pycomm.compress.quantized_gradients import QuantizedGradients, exchange_of
from pycomm.errors import InvalidArgument
from pycomm.group import Group


def dgc_hook(dgc: DGC, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: `ddp.register_comm_hook(dgc, pycomm.dgc_hook)`.

    The exchange uses pycomm's default group, which is torch's default process group if its backend
    is pycomm. The call with the last bucket ends the step.

    Args:
        dgc: the compression of the optimizer that trains the DDP module.
        bucket: flat gradients [n] of some parameters, as DDP passes them; changed in place.

    Returns:
        A completed future of the bucket's buffer [n]. Its content is final after the call with the
        last bucket.

    Raises:
        PeerLost, Timeout, Mismatch: errors of the exchange; the step was rolled back.
        InvalidArgument, Unsupported: arguments of other types, or settings of DGC that the model
            does not support; or the group was replaced or shrunk, which needs
            pycomm.DataParallel(model, compression=dgc).
    """
    instance("dgc", dgc, DGC, "a pycomm.DGC")
    return _exchanged(compressor_of(dgc), bucket)


def quantize_hook(
    quantized: QuantizedGradients, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """DDP communication hook: `ddp.register_comm_hook(quantized, pycomm.quantize_hook)`.

    Groups and the order of calls are as with dgc_hook. For names without "module." make `quantized`
    from the parameters of the model inside of DDP.

    Args:
        quantized: of the parameters of the DDP module.
        bucket: flat gradients [n] of some parameters, as DDP passes them; changed in place.

    Returns:
        A completed future of the bucket's buffer [n]. Its content is final after the call with the
        last bucket.

    Raises:
        PeerLost, Timeout, Mismatch: errors of the exchange; the residuals stay as they were.
        InvalidArgument: arguments of other types; a parameter of the model is unknown to
            `quantized`; or as of dgc_hook.
    """
    instance("quantized", quantized, QuantizedGradients, "a pycomm.QuantizedGradients")
    return _exchanged(exchange_of(quantized), bucket)


def _exchanged(
    exchange: Compressor | GradientExchange, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    instance("bucket", bucket, GradBucket, "a bucket of torch's DDP")
    if bucket.index() == 0:
        if exchange.group.successor is not None:
            raise InvalidArgument(
                "the group of this communication hook was replaced or shrunk, and torch's DDP "
                "keeps its ranks: wrap the model in pycomm.DataParallel(model, compression=...) "
                "instead, whose replace() and shrink() keep residuals and give a new rank its state"
            )
        exchange.cancel()  # an earlier backward pass may have failed
        _usage.setdefault(exchange, _Usage()).begin()
    exchange.tag(bucket.index())
    usage, flat, parameters = _usage[exchange], bucket.buffer(), bucket.parameters()
    exchange.add(flat, parameters, bucket.gradients(), usage.lacking(parameters))
    if bucket.is_last():
        exchange.finish(usage.unused(exchange.group))
    # torch reads buckets only after the call with the last one, when all of them are final.
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(flat)
    return future


class _Usage:
    """Which parameters got a gradient since the last exchange. DDP counts so, and drops the result
    of the exchange for a parameter that no rank used."""

    def __init__(self) -> None:
        self._used: set[int] = set()  # identities
        self._watched: dict[int, Tensor] = {}
        self._of_pass: list[Tensor] = []

    def begin(self) -> None:
        """A pass begins."""
        self._of_pass = []

    def lacking(self, parameters: Sequence[Tensor]) -> set[Tensor]:
        """Those of a bucket without a gradient on this rank."""
        self._of_pass += parameters
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched[id(parameter)] = parameter
                register: Any = parameter.register_hook
                register(_adds(id(parameter), self._used))
                if parameter.grad is not None:
                    self._used.add(id(parameter))
        return {parameter for parameter in parameters if id(parameter) not in self._used}

    def unused(self, group: Group) -> set[Tensor]:
        """Collective. Those of the pass that no rank used; ends the pass."""
        used = torch.tensor([id(p) in self._used for p in self._of_pass], dtype=torch.uint8)
        collectives.all_reduce(used, "max", group=group)
        self._used.clear()
        return {p for p, one in zip(self._of_pass, used.tolist(), strict=True) if not one}


def _adds(identity: int, used: set[int]) -> Callable[[Tensor], None]:
    """A hook of autograd."""

    def add(_: Tensor) -> None:
        used.add(identity)

    return add


_usage: weakref.WeakKeyDictionary[Compressor | GradientExchange, _Usage] = (
    weakref.WeakKeyDictionary()
)
