"""Quantized gradients for hybrid sharding (HSDP): fully_shard in a host, replicas between hosts.

    backward    layer n: reduce-scatter over shards | quantized mean over replicas | layer n - 1 ...
    at the end  all ranks agree that all gradients are finite, and commit the residuals

fully_shard has the mesh of the shards only, and the hook averages over the replicas. With a mesh of
two dimensions fully_shard averages over the replicas itself before it calls a hook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pycomm._quantize import Quantize
from pycomm._training import coalesced
from pycomm._training.communicators import CommunicatorPool
from pycomm._training.shards import check_replicas, check_sharded, on_all, replica_group
from pycomm.compress.gradient_exchange import GradientExchange
from pycomm.compress.quantized_gradients import QuantizedGradients, exchange_of
from pycomm.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def quantize_hsdp(
    model: nn.Module,
    replicas: DeviceMesh,
    compression: Quantize = Quantize(),  # noqa: B008 - immutable
    *,
    scaler: torch.amp.GradScaler | None = None,
) -> QuantizedGradients:
    """Averages the gradients of FSDP2 over replicas of the model, quantized. Collective.

        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])      # the layers first, as usual
        quantized = pycomm.quantize_hsdp(model, mesh["replicate"], pycomm.Quantize())

    It takes the place of the all-reduce of HSDP, and of fully_shard(model, mesh=mesh). All replicas
    take the parameters and buffers of the first one. The exchange is a hook of
    `FSDPModule.set_all_reduce_hook`, and uses pycomm's default group, which has all ranks of the
    mesh. Optimizer and learning rate stay as they are.

    Residuals are of the local shards of this rank, padded to the size of the first shard. The state
    has this rank's, and `gather_state` collects those of the replicas of one shard: `rank` and
    `size` count replicas. If a gradient of any rank is not finite, no residual changes on any rank.

    Args:
        model: fully_shard was called on it, and on any of its modules, with one mesh of shards.
        replicas: the dimension of the replicas, in one mesh with the shards.
        compression: the bits, and whether there is error feedback.
        scaler: the GradScaler of the training, if any: residuals follow a change of its scale.

    Returns:
        The state of the exchange, for checkpoints and statistics.

    Raises:
        InvalidArgument: the model or a mesh is not as described.
        Unsupported: a parameter is not in host memory.
        Error: as pycomm.broadcast. Backward raises errors of the exchange, and InvalidArgument if
            some parameters of a module have no gradient.
    """
    modules = _sharded_modules(model, replicas)
    shards = next(iter(modules.values()))[0][1].device_mesh.get_group()
    named = [
        (name, _placeholder(name, parameter))
        for parameters in modules.values()
        for name, parameter in parameters
    ]
    quantized = QuantizedGradients(named, compression, scaler=scaler)
    group = replica_group(replicas)
    local = [parameter.to_local() for parameters in modules.values() for _, parameter in parameters]
    coalesced.bcast_list_([*local, *model.buffers()], 0, group)
    exchange, placeholders = exchange_of(quantized), dict(named)
    exchange.attach(placeholders, CommunicatorPool(group, 1), {})
    passes = _Passes(exchange, shards)
    for module, parameters in modules.items():
        module.set_all_reduce_hook(_hook(passes, [placeholders[name] for name, _ in parameters]))
    return quantized


class _Passes:
    """The backward passes of a model; each ends with a vote of all ranks.

    Args:
        exchange: of the replicas.
        shards: the ranks of one replica.
    """

    def __init__(self, exchange: GradientExchange, shards: dist.ProcessGroup) -> None:
        self._exchange, self._shards = exchange, shards
        self._taken: set[Tensor] = set()  # of the current pass

    def average(self, flat: Tensor, parameters: Sequence[Tensor]) -> None:
        """Averages the gradients of one module; the first of a pass schedules its end."""
        expected = sum(parameter.numel() for parameter in parameters)
        if flat.numel() != expected:
            raise InvalidArgument(
                f"quantize_hsdp: got {flat.numel()} gradients of a module, expected {expected}: "
                "every parameter that requires gradients must get one; call fully_shard for one "
                "module at a time, not for a list"
            )
        if parameters[0] in self._taken:
            raise InvalidArgument(
                "quantize_hsdp: a module got a second gradient in one backward pass: call "
                "set_requires_gradient_sync(False) before all passes but the last"
            )
        if not self._taken:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._taken.add(parameters[0])
        self._exchange.average(flat, parameters)

    def _finish(self) -> None:
        self._taken.clear()
        self._exchange.finish(agree=lambda finite: on_all(finite, self._shards))


def _hook(passes: _Passes, parameters: Sequence[Tensor]) -> Callable[[Tensor], None]:
    return lambda flat: passes.average(flat, parameters)


def _sharded_modules(
    model: nn.Module, replicas: DeviceMesh
) -> Mapping[FSDPModule, list[tuple[str, Any]]]:
    """The parameters whose gradients each call of fully_shard reduces, with their names."""
    from torch.distributed.fsdp import FSDPModule

    check_replicas("quantize_hsdp", replicas)
    if not isinstance(model, FSDPModule):
        raise InvalidArgument(
            f"quantize_hsdp: got a {type(model).__name__}, on which fully_shard was not called: "
            'call fully_shard(model, mesh=mesh["shard"]), or use pycomm.DataParallel(model, '
            "compression=...) for a model without shards"
        )
    found: dict[FSDPModule, list[tuple[str, Any]]] = {}
    owner: dict[nn.Module, FSDPModule] = {}
    known: set[nn.Parameter] = set()  # modules may share one
    for module_name, module in model.named_modules():
        parent = owner.get(module, model)
        mine = module if isinstance(module, FSDPModule) else parent
        owner.update((child, mine) for child in module.children())
        prefix = module_name and f"{module_name}."
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in known:
                known.add(parameter)
                check_sharded("quantize_hsdp", prefix + name, parameter)
                found.setdefault(mine, []).append((prefix + name, parameter))
    if not found:
        raise InvalidArgument("quantize_hsdp: the model has no parameters that require gradients")
    return found


def _placeholder(name: str, parameter: Any) -> Tensor:
    """A tensor with the padded size of the parameter's shards, almost without memory."""
    dim, ranks = parameter.placements[0].dim, parameter.device_mesh.size()
    sizes = list(parameter.shape)
    sizes[dim] = -(-sizes[dim] // ranks)
    local = parameter.to_local()
    if not local.is_floating_point() or not local.is_cpu:
        raise Unsupported(
            f"quantize_hsdp: {name!r} is {local.dtype} on {local.device}, expected floating point "
            "in host memory"
        )
    found: Tensor = local.new_empty(1).expand(math.prod(sizes))
    return found
