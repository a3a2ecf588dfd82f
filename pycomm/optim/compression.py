"""What LocalSGD does for compression: checks, the compressor, and decoupled weight decay.

Decay p *= 1 - lr * weight_decay is no part of the updates that ranks exchange: it is taken out of
the optimizer's step, and every rank applies it to the shared parameters.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pycomm._arguments import refuse
from pycomm._quantize import Quantize
from pycomm._training.arguments import check_module
from pycomm._training.parameters import check_initialized
from pycomm._training.shards import is_sharded
from pycomm.compress.quantized_updates import QuantizedUpdates
from pycomm.compress.topk import TopK
from pycomm.compress.topk_updates import TopKUpdates
from pycomm.compress.updates import UpdateCompressor
from pycomm.errors import InvalidArgument, Unsupported

# By the class of their options.
COMPRESSORS: dict[type[Any], type[UpdateCompressor[Any]]] = {
    TopK: TopKUpdates,
    Quantize: QuantizedUpdates,
}


def check_model(model: nn.Module, replicas: DeviceMesh | None) -> None:
    """Raises an error for a wrapper, a lazy module, or shards without a mesh of replicas."""
    check_module("model", model)
    check_initialized("LocalSGD", model.named_parameters())
    if hasattr(model, "no_sync"):
        raise InvalidArgument(
            f"LocalSGD: {type(model).__name__} averages gradients: pass the module inside it"
        )
    for name, parameter in () if replicas is not None else model.named_parameters():
        if is_sharded(parameter):
            raise Unsupported(
                f"LocalSGD: {name!r} is a shard (DTensor, FSDP): with replicas of the shards "
                "(HSDP) write LocalSGD(model, optimizer, compression=..., "
                'replicas=mesh["replicate"])'
            )


def check_compression(compression: Any, rule: str, momentum: str) -> None:
    """Raises InvalidArgument unless this compresses updates, with such a schedule of LocalSGD."""
    if not isinstance(compression, tuple(COMPRESSORS)):
        refuse("compression", compression, "pycomm.TopK() or pycomm.Quantize()")
    if (rule, momentum) != ("paddle", "local"):
        raise InvalidArgument(
            f'compression: got rule={rule!r} and momentum={momentum!r}, expected "paddle" and '
            '"local"'
        )


def update_compressor(compression: Any, *given: Any) -> UpdateCompressor[Any]:
    """The compressor of these options; the other arguments are those of UpdateCompressor."""
    kind = next(kind for kind in COMPRESSORS if isinstance(compression, kind))
    return COMPRESSORS[kind](compression, *given)


def warn_about_momentum(optimizer: torch.optim.Optimizer, ratio: float) -> None:
    """Warns if the optimizer's momentum trains worse with a compression of this ratio."""
    group = optimizer.param_groups[0]
    first = float(group["betas"][0]) if "betas" in group else float(group.get("momentum", 0))
    if first > 0.5 and ratio > 20:
        name = "betas[0]" if "betas" in group else "momentum"
        warnings.warn(
            f"{type(optimizer).__name__} with {name}={first} trains worse with a compression above "
            "20, because the residual already acts as momentum: use 0",
            stacklevel=3,
        )


def _decoupled_groups(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """The parameter groups with decoupled weight decay, as far as torch's options tell."""
    for group in optimizer.param_groups:
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        if decoupled and group.get("weight_decay"):
            yield group


@contextlib.contextmanager
def without_decay(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The optimizer's decoupled weight decay is 0 in the block."""
    hidden = [(group, group["weight_decay"]) for group in _decoupled_groups(optimizer)]
    for group, _ in hidden:
        group["weight_decay"] = 0.0
    try:
        yield
    finally:
        for group, decay in hidden:
            group["weight_decay"] = decay


def multiply_factors(
    factors: list[float], optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
) -> None:
    """Multiplies the factor of each parameter by that of one step.

    Args:
        factors: of `parameters`, in place.
        optimizer: its groups have learning rate and weight decay.
        parameters: those that ranks share.
    """
    groups = list(_decoupled_groups(optimizer))
    places = {parameter: i for i, parameter in enumerate(parameters)} if groups else {}
    for group in groups:
        factor = 1.0 - float(group["lr"]) * float(group["weight_decay"])
        for parameter in group["params"]:
            if parameter in places:
                factors[places[parameter]] *= factor
