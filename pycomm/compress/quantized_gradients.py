"""QuantizedGradients, the compression that users construct; gradient_exchange.py runs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pycomm._arguments import instance
from pycomm._quantize import Quantize
from pycomm._training.arguments import check_scaler, named_tensors
from pycomm.compress.gradient_exchange import GradientExchange


class QuantizedGradients:
    """Quantized gradients of a model, with the residuals of its parameters; for any optimizer.

        quantized = pycomm.QuantizedGradients(model.named_parameters(), pycomm.Quantize())
        model = pycomm.DataParallel(model, compression=quantized)      # or, around torch's own:
        ddp.register_comm_hook(quantized, pycomm.quantize_hook)

    `pycomm.DataParallel(model, compression=pycomm.Quantize())` makes one, as `model.compression`.
    After backward() every p.grad has the mean over all ranks, with the same bits on every rank,
    which do not depend on the buckets. If a gradient is not finite on any rank, gradients are NaN
    on all ranks, and the residuals stay as they were. Gradients of float64 are sent exactly.

    Args:
        named_parameters: of the model, in the same order on all ranks.
        compression: the bits, and whether there is error feedback.
        scaler: the GradScaler or StaticLossScaler of the training, if any: residuals follow a
            change of the loss scale.

    Raises:
        InvalidArgument: an argument is of another type.
        Unsupported: a parameter is neither in host memory nor on a GPU.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        compression: Quantize = Quantize(),  # noqa: B008 - immutable
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        instance("compression", compression, Quantize, "pycomm.Quantize()")
        check_scaler(scaler)
        named = named_tensors("named_parameters", named_parameters)
        self._exchange = GradientExchange(named, compression, scaler)

    def stats(self) -> dict[str, Any]:
        """Numbers of the last exchange, on this rank.

        Returns:
            step: committed exchanges. bits, down_bits: of Quantize. sent_bytes: bytes that this
            rank gave to the exchange. dense_bytes: bytes of all gradients. exchange: "sharded",
            "hierarchical", "dense", or "" before the first one. exchange_costs: with "auto_time",
            the estimated seconds of a step by exchange, if they were estimated; else {}.
        """
        return self._exchange.stats()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, as plain values and flat tensors in the memory order of a parameter.

        It loads at the same number of ranks, bit for bit. A failed backward pass is not in it.

        Returns:
            version, rank, size, step: numbers. scale: the loss scale of the residuals. exchange: as
            in stats(). hosts: the host of each rank if the ranks of a host share residuals, else
            []; a host then takes the place of a rank. residual, owner_residual: by name of the
            parameter, float32, [elements] and [elements that this rank owns]; they differ by rank.
            Parameters that were not exchanged yet are missing.

        Raises:
            InvalidArgument: inside backward().
        """
        return self._exchange.save()

    def gather_state(self, dst: int = 0) -> dict[str, Any] | None:
        """Collective. Gathers the states of all ranks; the result loads at any number of ranks.

        Args:
            dst: the rank that receives the states.

        Returns:
            On rank `dst` version, size, and ranks: a list of what state_dict() returns on each
            rank. None on the others.

        Raises:
            InvalidArgument: inside backward(), or `dst` is no rank.
            Error: as pycomm.gather.
        """
        return self._exchange.gather(dst)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores a state. Nothing changes if it raises.

        At another number of ranks each rank takes the mean of the residuals, with those of the
        owners, over the saved ranks: so what is not sent yet stays the same in the mean gradient.

        Args:
            saved: of state_dict() on this rank, or of gather_state() on any rank.

        Raises:
            InvalidArgument: the state lacks values, or is of another version or model, or it is one
                rank's state of another rank or number of ranks, or the call is inside backward().
        """
        self._exchange.load(saved)


def exchange_of(quantized: QuantizedGradients) -> GradientExchange:
    """The exchange of `quantized`, for the reducers of pycomm and of torch."""
    return quantized._exchange
