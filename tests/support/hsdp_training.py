"""Training with FSDP2 on a mesh of replicas x 2 shards."""

from typing import Any

import torch.distributed as dist
from small_models import batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


def mesh_of(replicas: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, model: Any) -> Any:
    """The model of three layers, in three calls of fully_shard."""
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def local_parts(model: nn.Module) -> list[Tensor]:
    """Copies of this rank's shards."""
    return [p.detach().to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]  # DTensors


def full_parts(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]  # DTensors


def backward(model: nn.Module, step: int, factor: Any = 1.0) -> None:
    """For this rank's batch of the step, with the loss times the factor."""
    x, y = batch(dist.get_rank(), step)
    (F.mse_loss(model(x), y) * factor).backward()
