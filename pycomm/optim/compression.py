"""Checks of the arguments of LocalSGD, and which compressor it uses."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pycomm._arguments import one_of, refuse
from pycomm._quantize import Quantize
from pycomm._training.arguments import check_module, check_optimizer
from pycomm._training.parameters import check_initialized
from pycomm._training.shards import check_replicas, is_sharded
from pycomm.compress.quantized_updates import QuantizedUpdates
from pycomm.compress.topk import TopK
from pycomm.compress.topk_updates import TopKUpdates
from pycomm.compress.updates import UpdateCompressor
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import Group


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer, momentum: str) -> None:
    """Raises InvalidArgument for a wrapper, a lazy module, or momentum that cannot be averaged."""
    check_module("model", model)
    one_of("momentum", momentum, ("local", "averaged"))
    check_initialized("LocalSGD", model.named_parameters())
    if hasattr(model, "no_sync"):
        raise InvalidArgument(
            f"LocalSGD: {type(model).__name__} averages gradients: pass the module inside it"
        )
    if momentum == "averaged" and not isinstance(optimizer, torch.optim.SGD):
        raise InvalidArgument(
            f'momentum="averaged": got {type(optimizer).__name__}, expected torch.optim.SGD'
        )


def check_optimizers(optimizer: Any, outer: Any, muon: Any) -> None:
    """Raises InvalidArgument unless these are torch optimizers; None for the last two: none."""
    for name, one in {"optimizer": optimizer, "outer": outer, "muon": muon}.items():
        if one is not None or name == "optimizer":
            check_optimizer(name, one)


def check_compression(compression: Any) -> None:
    """Raises InvalidArgument unless this is a compression of updates."""
    if not isinstance(compression, (TopK, Quantize)):
        refuse("compression", compression, "pycomm.TopK() or pycomm.Quantize()")


def check_supported(rule: str, momentum: str) -> None:
    """Raises InvalidArgument unless compression knows this schedule of LocalSGD."""
    if (rule, momentum) != ("paddle", "local"):
        raise InvalidArgument(
            f'compression: got rule={rule!r} and momentum={momentum!r}, expected "paddle" and '
            '"local"'
        )


def check_shards(
    model: nn.Module, replicas: DeviceMesh | None, compressed: bool, group: Group | None, muon: bool
) -> None:
    """Raises an error unless LocalSGD knows how to treat the shards of the model."""
    if replicas is None:
        for name, parameter in model.named_parameters():
            if is_sharded(parameter):
                raise Unsupported(
                    f"LocalSGD: {name!r} is a shard (DTensor, FSDP): with replicas of the shards "
                    "(HSDP) write LocalSGD(model, optimizer, compression=..., "
                    'replicas=mesh["replicate"])'
                )
        return
    check_replicas("LocalSGD", replicas)
    if not compressed or group is not None or muon:
        raise InvalidArgument(
            "LocalSGD: replicas needs compression, no group and no muon: the mesh has the groups, "
            "and Muon needs whole matrices"
        )


def update_compressor(
    compression: TopK | Quantize,
    parameters: list[nn.Parameter],
    snapshot: list[Tensor],
    group: Group,
) -> UpdateCompressor[Any]:
    """The compressor of a TopK or Quantize; the arguments are those of UpdateCompressor."""
    if isinstance(compression, TopK):
        return TopKUpdates(compression, parameters, snapshot, group)
    return QuantizedUpdates(compression, parameters, snapshot, group)


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
