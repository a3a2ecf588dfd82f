"""The shards of a model of which LocalSGD compresses the updates (HSDP).

    between replicas    the ranks with the same shard exchange its updates, in a group of their own
    in a replica        the ranks sum the norms of their shards, and commit a step together

Both are small sums, so a step sends almost nothing else inside a replica.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pycomm._training.shards import check_sharded, on_all, replica_group
from pycomm.errors import Error, InvalidArgument


class ModelShards:
    """The ranks that hold a replica of a model, and those that hold this rank's shard of it.

    Collective over the default group.

    Args:
        model: fully_shard was called on it, with a mesh of the shards.
        replicas: the dimension of the replicas, in one mesh with the shards.

    Attributes:
        group: the ranks that hold this rank's shard.

    Raises:
        InvalidArgument: the model or the mesh is not as described.
    """

    def __init__(self, model: nn.Module, replicas: DeviceMesh) -> None:
        named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
        for name, parameter in named:
            check_sharded("LocalSGD", name, parameter)
        meshes = {parameter.device_mesh for _, parameter in named}  # type: ignore[attr-defined]  # DTensors
        if len(meshes) != 1:
            raise InvalidArgument(
                f"LocalSGD: got parameters on {len(meshes)} meshes, expected one mesh of shards"
            )
        mesh = meshes.pop()
        self._ranks, self._device = mesh.get_group(), mesh.device_type
        self.group = replica_group(replicas)

    def norm(self, mine: float) -> float:
        """The norm of a vector, given that of this rank's shard. Collective over the replica."""
        square = torch.tensor([mine * mine], dtype=torch.float64, device=self._device)
        dist.all_reduce(square, group=self._ranks)
        return math.sqrt(float(square))

    @contextlib.contextmanager
    def agreement(self) -> Iterator[Callable[[], None]]:
        """Collective over the replica. Yields a call that returns only if each rank of the replica
        made it; if the block of one raises instead, it raises on the others.

        Raises:
            Error: another rank did not get to its call.
        """
        called = False

        def agree() -> None:
            nonlocal called
            called = True
            if not on_all(True, self._ranks, self._device):
                raise Error("LocalSGD: another shard of this replica failed: see that rank's error")

        try:
            yield agree
        finally:
            if not called:
                with contextlib.suppress(Exception):  # the block raises its own error
                    on_all(False, self._ranks, self._device)
