"""What DGC holds for each parameter, and the optimizer whose momentum it has taken over.

u is the velocity, v what this rank owes to the others. Both lie in the order of the parameter's
memory, float32, or float64 for float64. Called by dgc.py and by the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycomm.errors import InvalidArgument, Unsupported

__all__ = ["AdoptedMomentum", "Hyper", "ParameterState", "line"]


@dataclass(frozen=True)
class Hyper:
    """Of a parameter group, as the optimizer has it at this step."""

    momentum: float
    weight_decay: float
    nesterov: bool


@dataclass(eq=False)
class ParameterState:
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


class AdoptedMomentum:
    """A torch.optim.SGD that does `p -= lr * p.grad` alone, and the memories of its parameters.

    While its step() runs, what is `owned` of momentum, weight_decay and nesterov is 0 in its
    groups; else it is what the user and schedulers write there.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, min_count: int, owned: Collection[str]
    ) -> None:
        _check(optimizer)
        self.optimizer, self._owned = optimizer, owned
        self.memories: dict[Tensor, ParameterState] = {}
        for g, group in enumerate(optimizer.param_groups):
            names = group.get("param_names") or [f"{g}.{i}" for i in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                self.memories[parameter] = self._memory(name, parameter, group, min_count)
        self._hidden: list[dict[str, Any]] | None = None
        self._waiting = False  # something has arrived for the next step()
        self._exchanged: Collection[Tensor] | None = None  # by DataParallel; None: not known
        self._skipped = False  # the last exchange found Inf or NaN: step() may see such gradients
        self._applied: tuple[int, int, int] | None = None  # a gradient of the last step()
        self._update: Callable[[], None] | None = None
        self._updated: Sequence[ParameterState] = ()
        self._had_gradients = False  # one of `_updated`, when it had arrived
        self._handles = [
            optimizer.register_step_pre_hook(self._hide),
            optimizer.register_step_post_hook(self._show),
            optimizer.register_load_state_dict_post_hook(self._regroup),
        ]

    def _memory(
        self, name: str, parameter: Tensor, group: dict[str, Any], min_count: int
    ) -> ParameterState:
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
        return ParameterState(name, len(self.memories), parameter, group, self._owned, u, v)

    def rename(self, names: Mapping[str, Tensor]) -> None:
        """Gives memories the names of the model's parameters: those that are exchanged."""
        self._exchanged = set(names.values())
        for name, parameter in names.items():
            if parameter in self.memories:
                self.memories[parameter].name = name

    def arrived(
        self, update: Callable[[], None] | None = None, updated: Sequence[ParameterState] = ()
    ) -> None:
        """For the next step(), which calls `update` once in the optimizer's stead for `updated`,
        unless zero_grad() has taken their gradients away before."""
        self._waiting, self._update, self._updated = True, update, updated
        self._skipped = False
        self._had_gradients = self._have_gradients()

    def skipped(self) -> None:
        """All ranks skip this step. torch.optim.SGD(fused=True) finds that out inside step()."""
        self._skipped = True

    @property
    def waiting(self) -> bool:
        """Whether a step() would take something that has arrived: zero_grad() leaves nothing, or
        zeros with set_to_none=False."""
        gradients = [p.grad for p in self.memories if p.grad is not None]
        return self._waiting and any(_has_values(g) for g in gradients)

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

    def _hide(
        self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            self._take_over()
            return None
        if self._updated:
            raise Unsupported("DGC with fused=True: step() without a closure")

        def evaluate() -> Any:
            loss = closure()  # its backward() needs the momentum that is hidden behind it
            self._take_over()
            return loss

        return (args[0], evaluate), {}

    def _take_over(self) -> None:
        """Before the optimizer's own part of step(), with all gradients there."""
        if self._had_gradients and not self._have_gradients():
            self._taken()
        if not (self._waiting or self._skipped):
            self._refuse_unseen()
        for memory in self._updated:
            memory.parameter.grad = None  # this rank's alone: nobody shall step by it
        groups = self.optimizer.param_groups
        if self._hidden is None:  # else the last step() raised
            self._hidden = [{key: group[key] for key in self._owned} for group in groups]
        for group in groups:
            group.update({key: type(group[key])(0) for key in self._owned})

    def _with_gradient(self) -> Iterator[tuple[Any, ParameterState]]:
        """Of the model, as far as it is known: other parameters are not DGC's to exchange."""
        known = self.memories if self._exchanged is None else self._exchanged
        return (
            (p, memory) for p, memory in self.memories.items() if p.grad is not None and p in known
        )

    def _first_gradient(self) -> tuple[int, int, int] | None:
        """Its place, address and version, which every further backward() changes."""
        for parameter, memory in self._with_gradient():
            if not parameter.grad.is_sparse:
                return memory.place, parameter.grad.data_ptr(), parameter.grad._version
        return None

    def _refuse_unseen(self) -> None:
        """Raises where step() would use gradients that no exchange of DGC has brought: without
        momentum, and each rank its own. Those of the last step() count a second time."""
        if self._applied is not None and self._applied == self._first_gradient():
            return
        for parameter, memory in self._with_gradient():
            if _has_values(parameter.grad):
                raise InvalidArgument(
                    f"DGC: step() with a gradient of {memory.name!r} that DGC did not exchange: it "
                    "would be applied without momentum, on this rank alone. Before each step() run "
                    "one backward() outside no_sync() of pycomm.DataParallel(model, "
                    "compression=dgc), or of a DistributedDataParallel with "
                    "register_comm_hook(dgc, pycomm.dgc_hook). LocalSGD takes an optimizer without "
                    "DGC; dgc.detach() gives the optimizer its momentum back"
                )

    def _show(self, *_: Any) -> None:
        for group, owned in zip(self.optimizer.param_groups, self._hidden or (), strict=False):
            group.update(owned)
        self._hidden = None
        if self._update is not None:
            self._update()
        self._taken()
        self._skipped, self._applied = False, self._first_gradient()


def _has_values(gradient: Tensor) -> bool:
    """Whether an element is not 0."""
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())


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
