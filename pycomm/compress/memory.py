"""What DGC holds for each parameter, and the optimizer whose momentum it has taken over.

u is the velocity, v what this rank owes to the others. Both lie in the order of the parameter's
memory, float32, or float64 for float64. Called by dgc.py and by the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycomm.errors import InvalidArgument, Unsupported

__all__ = ["Hyper", "Memory", "TakenOver", "line"]


@dataclass(frozen=True)
class Hyper:
    """Of a parameter group, as the optimizer has it at this step."""

    momentum: float
    weight_decay: float
    nesterov: bool


@dataclass(eq=False)
class Memory:
    """One parameter's. `v` is None where it travels dense."""

    name: str
    place: int  # among all
    parameter: Tensor
    group: dict[str, Any]
    owned: Collection[str]  # what DGC does of it, the optimizer the rest
    u: Tensor
    v: Tensor | None

    @property
    def hyper(self) -> Hyper:
        """Read anew at every step, so that schedulers work."""
        momentum, decay, nesterov = (
            self.group[key] if key in self.owned else 0
            for key in ("momentum", "weight_decay", "nesterov")
        )
        return Hyper(float(momentum), float(decay), bool(nesterov))

    @property
    def count(self) -> int:
        """Elements."""
        return self.u.numel()

    @property
    def tensors(self) -> list[Tensor]:
        """u, and v if there is one."""
        return [self.u] if self.v is None else [self.u, self.v]


def line(x: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory, as a view [count]."""
    if x.is_contiguous():
        return x.detach().view(-1)
    return torch.as_strided(x.detach(), (x.numel(),), (1,))


def _is_dense(x: Tensor) -> bool:
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.numel() == 0 or reach + 1 == x.numel()


class TakenOver:
    """A torch.optim.SGD that does `p -= lr * p.grad` alone, and the memories of its parameters.

    While its step() runs, what is `owned` of momentum, weight_decay and nesterov is 0 in its
    groups; else it is what the user and schedulers write there.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, min_count: int, owned: Collection[str]
    ) -> None:
        _check(optimizer)
        self.optimizer, self._owned = optimizer, owned
        self.memories: dict[Tensor, Memory] = {}
        for g, group in enumerate(optimizer.param_groups):
            names = group.get("param_names") or [f"{g}.{i}" for i in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                self.memories[parameter] = self._memory(name, parameter, group, min_count)
        self._hidden: list[dict[str, Any]] | None = None
        self._waiting = False  # something has arrived for the next step()
        self._update: Callable[[], None] | None = None
        self._updated: Sequence[Memory] = ()
        self._had_gradients = False  # one of `_updated`, when it had arrived
        self._handles = [
            optimizer.register_step_pre_hook(self._hide),
            optimizer.register_step_post_hook(self._show),
            optimizer.register_load_state_dict_post_hook(self._regroup),
        ]

    def _memory(
        self, name: str, parameter: Tensor, group: dict[str, Any], min_count: int
    ) -> Memory:
        if not _is_dense(parameter):
            raise Unsupported(f"DGC: the elements of {name!r} do not fill its memory: clone it")
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        u = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
        velocity = None
        if "momentum" in self._owned:
            velocity = self.optimizer.state.pop(parameter, {}).get("momentum_buffer")
        if velocity is not None:
            torch.as_strided(u, parameter.shape, parameter.stride()).copy_(velocity)
        compressed = parameter.numel() >= max(min_count, 1)
        v = torch.zeros_like(u) if compressed else None
        return Memory(name, len(self.memories), parameter, group, self._owned, u, v)

    def rename(self, names: Mapping[str, Tensor]) -> None:
        """Gives memories the names of the model's parameters."""
        for name, parameter in names.items():
            if parameter in self.memories:
                self.memories[parameter].name = name

    def arrived(
        self, update: Callable[[], None] | None = None, updated: Sequence[Memory] = ()
    ) -> None:
        """For the next step(), which calls `update` once in the optimizer's stead for `updated`,
        unless zero_grad() has taken their gradients away before."""
        self._waiting, self._update, self._updated = True, update, updated
        self._had_gradients = self._have_gradients()

    @property
    def waiting(self) -> bool:
        """Whether a step() would take something that has arrived: zero_grad() leaves nothing, or
        zeros with set_to_none=False."""
        gradients = [p.grad for p in self.memories if p.grad is not None]
        return self._waiting and any(
            bool((g.coalesce().values() if g.is_sparse else g).any()) for g in gradients
        )

    def forget(self) -> None:
        """What has arrived is not for the next step() any more, nor are the gradients."""
        self._taken()
        for parameter in self.memories:
            parameter.grad = None

    def _have_gradients(self) -> bool:
        return any(memory.parameter.grad is not None for memory in self._updated)

    def _taken(self) -> None:
        self._waiting, self._update, self._updated = False, None, ()

    def give_back(self, velocities: Sequence[Tensor]) -> None:
        """The optimizer is its own again, with these velocities, as torch understands them."""
        for handle in self._handles:
            handle.remove()
        for memory, velocity in zip(self.memories.values(), velocities, strict=True):
            if memory.hyper.momentum:
                p = memory.parameter
                shaped = torch.as_strided(velocity, p.shape, p.stride(), velocity.storage_offset())
                self.optimizer.state[p]["momentum_buffer"] = shaped.to(p.dtype, copy=True)

    def _regroup(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that has loaded a state has new groups."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self.memories:
                    self.memories[parameter].group = group

    def _hide(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._updated and (args[1:] or kwargs):  # args[0] is the optimizer
            raise Unsupported("DGC with fused=True: step() without a closure")
        if self._had_gradients and not self._have_gradients():
            self._taken()
        for memory in self._updated:
            memory.parameter.grad = None  # this rank's alone: nobody shall step by it
        groups = self.optimizer.param_groups
        if self._hidden is None:  # else the last step() raised
            self._hidden = [{key: group[key] for key in self._owned} for group in groups]
        for group in groups:
            group.update({key: type(group[key])(0) for key in self._owned})

    def _show(self, *_: Any) -> None:
        for group, owned in zip(self.optimizer.param_groups, self._hidden or (), strict=False):
            group.update(owned)
        self._hidden = None
        if self._update is not None:
            self._update()
        self._taken()


def _check(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.SGD):
        raise Unsupported(
            f"DGC owns the momentum, which it can take over from torch.optim.SGD only, not from "
            f"{type(optimizer).__name__}: use SGD, or pycomm.LocalSGD, which takes any optimizer"
        )
    for group in optimizer.param_groups:
        if group["dampening"] != 0 or group["maximize"]:
            raise InvalidArgument("DGC knows no dampening and no maximize: leave them out")
        for parameter in group["params"]:
            if hasattr(parameter, "device_mesh"):
                raise Unsupported(
                    "DGC takes whole replicas, not shards (DTensor, FSDP, ZeRO): train them dense"
                )
            if not parameter.is_floating_point():
                raise Unsupported(f"DGC takes real floating parameters, not {parameter.dtype}")
