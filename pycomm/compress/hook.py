"""DGC and quantized gradients as communication hooks of torch's DistributedDataParallel."""

# No `from __future__ import annotations`: torch checks the annotations of a hook.
import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs hide it

from pycomm.compress.compressor import Compressor
from pycomm.compress.dgc import DGC, compressor_of
from pycomm.compress.gradient_exchange import GradientExchange
from pycomm.compress.quantized_gradients import QuantizedGradients, exchange_of
from pycomm.errors import InvalidArgument

__all__ = ["dgc_hook", "quantize_hook"]


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
        InvalidArgument, Unsupported: settings of DGC that the model does not support; or the group
            was replaced or shrunk, which needs pycomm.DataParallel(model, compression=dgc).
    """
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
        InvalidArgument: a parameter of the model is unknown to `quantized`; or as of dgc_hook.
    """
    return _exchanged(exchange_of(quantized), bucket)


def _exchanged(
    exchange: Compressor | GradientExchange, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    if bucket.index() == 0:
        if exchange.group.successor is not None:
            raise InvalidArgument(
                "the group of this communication hook was replaced or shrunk, and torch's DDP "
                "keeps its ranks: wrap the model in pycomm.DataParallel(model, compression=...) "
                "instead, whose replace() and shrink() keep residuals and give a new rank its state"
            )
        exchange.cancel()  # an earlier backward pass may have failed
    flat = bucket.buffer()
    exchange.add(flat, bucket.parameters(), bucket.gradients())
    if bucket.is_last():
        exchange.finish()
    # torch reads buckets only after the call with the last one, when all of them are final.
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(flat)
    return future
