"""Shards of a model: tensors of which each rank holds a part (DTensor, as of fully_shard), and the
ranks that hold the same part (HSDP)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pycomm._arguments import instance
from pycomm.default_group import default
from pycomm.errors import InvalidArgument
from pycomm.group import Group


def is_sharded(value: Any) -> bool:
    """Whether a value is a DTensor."""
    return hasattr(value, "device_mesh")


def local_shard(value: Any) -> Any:
    """The shard of a DTensor, which shares its memory; another value as it is."""
    return value.detach().to_local() if is_sharded(value) else value


def as_shard(value: Tensor, parameter: Any) -> Tensor:
    """A DTensor like the parameter with this shard; `value` for a parameter without shards."""
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def check_sharded(owner: str, name: str, parameter: Any) -> None:
    """Raises InvalidArgument unless the parameter is sharded over one dimension of a mesh."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.ndim != 1 or not parameter.placements[0].is_shard():
        found = "no shard" if mesh is None else f"placements {parameter.placements}"
        raise InvalidArgument(
            f"{owner}: {name!r} has {found}, expected one dimension of shards: call "
            'fully_shard(module, mesh=mesh["shard"]), because with a mesh of two dimensions '
            "fully_shard averages over the replicas itself"
        )


def check_replicas(owner: str, replicas: DeviceMesh) -> None:
    """Raises InvalidArgument unless this is one dimension of a mesh."""
    instance("replicas", replicas, DeviceMesh, 'a dimension of a mesh, as mesh["replicate"]')
    if replicas.ndim != 1:
        raise InvalidArgument(
            f"{owner}: invalid replicas: got a mesh of {replicas.ndim} dimensions, expected "
            'one: pass mesh["replicate"]'
        )


def on_all(flag: bool, ranks: dist.ProcessGroup, device: str = "cpu") -> bool:
    """Whether a flag is set on all ranks. Collective.

    Args:
        flag: of this rank.
        ranks: those of a replica.
        device: the kind of device that the group sends from.
    """
    word = torch.tensor([float(flag)], device=device)
    dist.all_reduce(word, dist.ReduceOp.MIN, group=ranks)
    return bool(word)


def replica_group(replicas: DeviceMesh) -> Group:
    """Collective over the default group. The ranks that hold the same shard as this one, in the
    order of the mesh."""
    ranks = dist.get_process_group_ranks(replicas.get_group())
    group = default().split(min(ranks), ranks.index(dist.get_rank()))
    assert group is not None  # the color is not negative
    return group
