"""DGC's state of each parameter, and the optimizer whose momentum DGC applies.

u is the velocity, v the residual: accumulated elements that this rank has not sent (error
feedback). Both are flat, in the order of the parameter's memory, float32, or float64 for float64.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycomm._training.arguments import check_optimizer
from pycomm._training.parameters import check_initialized
from pycomm._training.shards import is_sharded, local_shard
from pycomm.errors import InvalidArgument, Unsupported


@dataclass(frozen=True)
class Hyper:
    """Settings of a parameter group in this step."""

    momentum: float
    weight_decay: float
    nesterov: bool


@dataclass(eq=False)
class ParameterState:
    """The state of one parameter. `v` is None if it is sent uncompressed."""

    name: str
    place: int  # position among all parameters
    parameter: Tensor
    group: dict[str, Any]
    owned: Collection[str]  # settings that DGC applies; the optimizer applies the others
    u: Tensor
    v: Tensor | None

    @property
    def hyper(self) -> Hyper:
        """Read in every step, so that schedulers take effect."""
        momentum, decay, nesterov = (
            self.group[key] if key in self.owned else 0
            for key in ("momentum", "weight_decay", "nesterov")
        )
        return Hyper(float(momentum), float(decay), bool(nesterov))

    @property
    def late_decay(self) -> float:
        """Weight decay of DGC that is applied after the exchange: decay_correction=False."""
        owned = self.owned
        late = "momentum" in owned and "weight_decay" not in owned
        return float(self.group["weight_decay"]) if late else 0.0

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.u.numel()

    @property
    def tensors(self) -> list[Tensor]:
        """u, and v if it exists."""
        return [self.u] if self.v is None else [self.u, self.v]


def flat_view(x: Tensor) -> Tensor:
    """A flat view [count] of a dense tensor, or of its shard, in the order of its memory."""
    x = local_shard(x.detach())
    if x.is_contiguous():
        return x.view(-1)
    return torch.as_strided(x, (x.numel(),), (1,))


def is_dense(x: Tensor) -> bool:
    """Whether the memory of a tensor has no gaps."""
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.numel() == 0 or reach + 1 == x.numel()


class AdoptedMomentum:
    """A torch.optim.SGD that only does `p -= lr * p.grad`, and the state of its parameters.

    During its step() the `owned` settings of momentum, weight_decay and nesterov are 0 in its
    groups. Outside step() they have the values that the user and schedulers wrote.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, min_count: int, owned: Collection[str]
    ) -> None:
        _check(optimizer)
        self.optimizer = optimizer
        # DGC's momentum has the decay of uncompressed gradients, so the optimizer has none.
        late = ("weight_decay",) if "momentum" in owned and "weight_decay" not in owned else ()
        self._owned = (*owned, *late)
        self.memories: dict[Tensor, ParameterState] = {}
        for g, group in enumerate(optimizer.param_groups):
            names = group.get("param_names") or [f"{g}.{i}" for i in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                self.memories[parameter] = self._memory(name, parameter, group, owned, min_count)
        self._hidden: list[dict[str, Any]] | None = None
        self._waiting = False  # exchanged gradients wait for the next step()
        self._exchanged: Collection[Tensor] | None = None  # by DataParallel; None: unknown
        self._skipped = False  # the last exchange found Inf or NaN, which step() may see
        self._applied: tuple[int, int, int] | None = None  # a gradient of the last step()
        self._update: Callable[[], None] | None = None
        self._updated: Sequence[ParameterState] = ()
        self._had_gradients = False  # whether `_updated` had gradients after the exchange
        self.switched: Callable[[], bool] = lambda: False
        self._frozen: list[ParameterState] | None = None  # None: not known yet
        self._exchanged_values = _ExchangedValues()
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._hide),
            optimizer.register_step_post_hook(self._show),
            optimizer.register_load_state_dict_post_hook(self._take_loaded),
        ]
        for parameter, memory in self.memories.items():
            if parameter.requires_grad:
                register: Any = parameter.register_hook
                self._handles.append(register(_before(weakref.ref(self._exchanged_values), memory)))

    def _memory(
        self,
        name: str,
        parameter: Tensor,
        group: dict[str, Any],
        owned: Collection[str],
        min_count: int,
    ) -> ParameterState:
        if not is_dense(parameter):
            raise Unsupported(f"DGC: the memory of {name!r} has gaps: pass a clone of it")
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        u = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
        self._take_velocity(parameter, u)
        compressed = parameter.numel() >= max(min_count, 1)
        v = torch.zeros_like(u) if compressed else None
        return ParameterState(name, len(self.memories), parameter, group, owned, u, v)

    def _take_velocity(self, parameter: Tensor, u: Tensor) -> bool:
        """Moves the optimizer's velocity of a parameter, if there is one, to u."""
        if "momentum" not in self._owned:
            return False
        velocity = self.optimizer.state.pop(parameter, {}).get("momentum_buffer")
        if velocity is not None:
            torch.as_strided(u, parameter.shape, parameter.stride()).copy_(velocity)
        return velocity is not None

    def rename(self, names: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
        """Names the states after the model's parameters. `names` are the exchanged ones, `others`
        frozen or sparse: a state has the same names if a layer is frozen later."""
        self._exchanged = set(names.values())
        for name, parameter in (*others.items(), *names.items()):
            if parameter in self.memories:
                self.memories[parameter].name = name
        self.settle()

    def settle(self) -> None:
        """Decides, at the first use, which parameters are never exchanged and so not compressed."""
        if self._frozen is not None:
            return
        memories = self.memories.values()
        self._frozen = [memory for memory in memories if not memory.parameter.requires_grad]
        for parameter, memory in self.memories.items():
            outside = self._exchanged is not None and parameter not in self._exchanged
            if outside or not parameter.requires_grad:
                memory.v = None

    def check(self) -> None:
        """Call it before the exchange of a pass.

        Raises:
            InvalidArgument: the exchange would use gradients that it made before, or parameters
                that it does not know.
        """
        self.settle()
        name = self._exchanged_values.taken_name()
        if name:
            raise InvalidArgument(
                f"DGC: backward() added to the gradient of {name!r}, which DGC had exchanged: run "
                "all passes before a step() but the last under no_sync(), and call zero_grad() "
                "after step()"
            )
        known = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if known != len(self.memories):
            raise InvalidArgument(
                f"DGC: the optimizer has {known} parameters, and had {len(self.memories)} when DGC "
                "was made: call add_param_group() before pycomm.DGC(optimizer)"
            )
        for memory in self._frozen or ():
            if memory.parameter.requires_grad:
                raise InvalidArgument(
                    f"DGC: requires_grad of {memory.name!r} was set after the first use of DGC: "
                    "set it before, and make DGC and the wrapper of the model anew"
                )

    def register_exchange(
        self, update: Callable[[], None] | None = None, updated: Sequence[ParameterState] = ()
    ) -> None:
        """Registers exchanged gradients for the next step(), which applies `update` to `updated` by
        itself, unless zero_grad() removed their gradients."""
        self._waiting, self._update, self._updated = True, update, updated
        self._skipped = False
        self._exchanged_values.register()
        self._had_gradients = self._have_gradients()

    def skipped(self) -> None:
        """All ranks skip this step. torch.optim.SGD(fused=True) detects that inside step()."""
        self._skipped = True

    @property
    def released(self) -> bool:
        """Whether release() gave the optimizer its momentum back."""
        return not self._handles

    @property
    def waiting(self) -> bool:
        """Whether step() would apply exchanged gradients; not after zero_grad(), which leaves None
        or zeros."""
        gradients = [p.grad for p in self.memories if p.grad is not None]
        return self._waiting and any(_has_values(g) for g in gradients)

    def forget(self) -> None:
        """Drops exchanged gradients before the next step(), and p.grad."""
        self._clear_update()
        for parameter in self.memories:
            parameter.grad = None

    def _have_gradients(self) -> bool:
        return any(memory.parameter.grad is not None for memory in self._updated)

    def _clear_update(self) -> None:
        self._waiting, self._update, self._updated = False, None, ()

    def release(self, velocities: Sequence[Tensor]) -> None:
        """Releases the optimizer and gives it these velocities, in torch's convention."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for memory, velocity in zip(self.memories.values(), velocities, strict=True):
            if memory.hyper.momentum:
                p = memory.parameter
                shaped = torch.as_strided(velocity, p.shape, p.stride(), velocity.storage_offset())
                self.optimizer.state[p]["momentum_buffer"] = shaped.to(p.dtype, copy=True)

    def _take_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """After load_state_dict() the optimizer has new groups, and velocities of a run without
        DGC."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                memory = self.memories.get(parameter)
                if memory is None:
                    continue
                memory.group = group
                took = self._take_velocity(parameter, memory.u)
                if took and memory.v is not None and self.switched() and memory.hyper.nesterov:
                    memory.u.mul_(memory.hyper.momentum)  # u follows DGC's formulas

    def _hide(
        self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            self._hide_settings()
            return None
        if self._updated:
            raise Unsupported("DGC with fused=True: call step() without a closure")

        def evaluate() -> Any:
            loss = closure()  # its backward() needs the momentum, so hide it afterwards
            self._hide_settings()
            return loss

        return (args[0], evaluate), {}

    def _hide_settings(self) -> None:
        """Sets owned settings to 0 before the optimizer's step, when all gradients are complete."""
        if self._had_gradients and not self._have_gradients():
            self._clear_update()
        if not (self._waiting or self._skipped):
            self._reject_unexchanged()
        for memory in self._updated:
            memory.parameter.grad = None  # of this rank only, so no step may use it
        groups = self.optimizer.param_groups
        if self._hidden is None:  # else the last step() raised
            self._hidden = [{key: group[key] for key in self._owned} for group in groups]
        for group in groups:
            group.update({key: type(group[key])(0) for key in self._owned})

    def _with_gradient(self) -> Iterator[tuple[Any, ParameterState]]:
        """Parameters with a gradient, of the model if it is known; DGC exchanges no others."""
        known = self.memories if self._exchanged is None else self._exchanged
        return (
            (p, memory) for p, memory in self.memories.items() if p.grad is not None and p in known
        )

    def _first_gradient(self) -> tuple[int, int, int] | None:
        """Place, address and version of a gradient; each backward() changes the version."""
        for parameter, memory in self._with_gradient():
            if not parameter.grad.is_sparse:
                return memory.place, parameter.grad.data_ptr(), parameter.grad._version
        return None

    def _reject_unexchanged(self) -> None:
        """Raises if step() would use gradients that DGC did not exchange: each rank would apply its
        own, without momentum. The gradients of the last step() may be applied again."""
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
        self._clear_update()
        self._skipped, self._applied = False, self._first_gradient()


class _ExchangedValues:
    """Whether gradients have the values of the last exchange, and a pass added to them.

    Attributes:
        present: gradients may have these values.
    """

    def __init__(self) -> None:
        self.present = False
        self._added_to = ""  # the name of a parameter
        self._cleared: set[str] = set()  # whose gradients were 0 before a pass

    def register(self) -> None:
        """All gradients have exchanged values."""
        self.present = True
        self._cleared.clear()

    def taken_name(self) -> str:
        """The name of a parameter to whose gradient a pass added, once."""
        name, self._added_to = self._added_to, ""
        return name

    def before(self, memory: ParameterState) -> None:
        """Autograd is about to set or change a gradient."""
        if not self.present:
            return
        gradient = memory.parameter.grad
        if gradient is None:
            self.present, self._added_to = False, ""
        elif memory.name in self._cleared:
            return  # it has the values of passes under no_sync()
        elif _has_values(gradient):
            self._added_to = memory.name
        else:
            self._cleared.add(memory.name)
            if self._added_to == memory.name:
                self._added_to = ""


def _before(values: weakref.ref[_ExchangedValues], memory: ParameterState) -> Callable[..., None]:
    """A hook of autograd that does not keep the state alive."""

    def before(_: Tensor) -> None:
        found = values()
        if found is not None:
            found.before(memory)

    return before


def _has_values(gradient: Tensor) -> bool:
    """Whether any element is not 0."""
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())


def _check(optimizer: torch.optim.Optimizer) -> None:
    check_optimizer("optimizer", optimizer)
    if not isinstance(optimizer, torch.optim.SGD):
        raise Unsupported(
            f"DGC needs torch.optim.SGD, got {type(optimizer).__name__}: for this optimizer write "
            "pycomm.LocalSGD(model, optimizer, compression=pycomm.TopK(ratio=200))"
        )
    for group in optimizer.param_groups:
        check_initialized("DGC", ((f"parameter {i}", p) for i, p in enumerate(group["params"])))
        if group["dampening"] != 0 or group["maximize"]:
            raise InvalidArgument(
                f"DGC: invalid optimizer: got dampening={group['dampening']} and "
                f"maximize={group['maximize']}, expected 0 and False: leave them out"
            )
        for parameter in group["params"]:
            if is_sharded(parameter):
                raise Unsupported(
                    "DGC needs full replicas, not shards (DTensor, FSDP, ZeRO): use "
                    "pycomm.quantize_hsdp with fully_shard"
                )
            if not parameter.is_floating_point():
                raise Unsupported(f"DGC needs real floating parameters, got {parameter.dtype}")
