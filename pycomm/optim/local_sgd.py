"""LocalSGD: ranks step independently and average their parameters periodically.

    step      1   2   3   4   5   6   7   8   9  10  11      begin_step 3, k_steps 4
    average   x   x   x               x               x      rule "paddle"
                              (4)             (8)            rule "torch" averages here instead

A rank takes part in averages by its step count only, not by its data, so no rank waits for one that
skipped a step. The adaptive form is adaptive.py.
Source: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (arXiv 1808.07217).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pycomm import coalesced, collectives
from pycomm.errors import InvalidArgument
from pycomm.group import Group, default
from pycomm.shrink_result import ShrinkResult, most_advanced_rank, shrink_result

__all__ = ["LocalSGD"]


class LocalSGD:
    """Wraps an optimizer of torch and averages the parameters over all ranks periodically.

        local = pycomm.LocalSGD(model, optimizer, k_steps=4, begin_step=100)
        loss.backward();  local.step()              # instead of optimizer.step()
        scaler.step(local);  scaler.update()        # the same with a loss scale

    The average is p = snapshot - mean(snapshot - p), where the snapshot is the last average, which
    all ranks share; the same bits on all ranks. At construction all ranks take rank 0's parameters
    and buffers. With an optimizer other than SGD, or rule "torch", gradients are averaged instead
    while step <= begin_step, since averaging the results of Adam is not Adam.

    Args:
        model: the module itself, not a wrapper that averages gradients.
        optimizer: any of torch's, over the model's parameters.
        k_steps: steps between two averages after begin_step; at least 1.
        begin_step: up to this step, counted from 1, ranks average every step; at least 1.
        rule: "paddle" averages k_steps after the last average; "torch" after steps begin_step + 1,
            begin_step + 1 + k_steps, ...
        momentum: "local", or "averaged" with the parameters (torch.optim.SGD only).
        buffers: also average floating-point buffers (batch norm's).
        outer: an optimizer of torch over the same parameters that steps after each average beyond
            begin_step, with mean(snapshot - p) as the gradient (DiLoCo, arXiv 2311.08105).
        group: the ranks; None: the default group.

    Attributes:
        step_count: steps so far, with skipped ones.
        last_sync: the step after which parameters were last averaged.
        k_steps: the current interval.

    Raises:
        InvalidArgument: an argument is invalid.
    """

    _step_supports_amp_scaling = (
        True  # GradScaler.step() always calls step() and reports Inf in found_inf
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        k_steps: int = 1,
        begin_step: int = 1,
        rule: str = "paddle",
        momentum: str = "local",
        buffers: bool = True,
        outer: torch.optim.Optimizer | None = None,
        group: Group | None = None,
    ) -> None:
        _check(model, optimizer, momentum)
        if k_steps < 1 or begin_step < 1:
            raise InvalidArgument(
                f"k_steps={k_steps}, begin_step={begin_step}: expected at least 1"
            )
        if rule not in ("paddle", "torch"):
            raise InvalidArgument(f'invalid rule: got {rule!r}, expected "paddle" or "torch"')
        self.optimizer, self.outer = optimizer, outer
        self.k_steps, self.step_count, self.last_sync = k_steps, 0, 0
        self._begin, self._rule, self._group = begin_step, rule, group or default()
        self._gradients_first = rule == "torch" or not isinstance(optimizer, torch.optim.SGD)
        self._average_momentum = momentum == "averaged"
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = [b for b in model.buffers() if b.is_floating_point()] if buffers else []
        coalesced.bcast_list_([*model.parameters(), *model.buffers()], 0, self._group)
        self._snapshot = [p.detach().clone() for p in self._parameters]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, in which a GradScaler finds the gradients."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's zero_grad."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of this rank and, if due, the average.

        Args:
            closure: as of torch's optimizers.

        Returns:
            The closure's result.

        Raises:
            Error: as pycomm.all_reduce, if it averages.
        """
        result = self._local_step(closure)
        if self.is_due(self.step_count):
            self.average()
        return result

    def is_due(self, step: int) -> bool:
        """Whether parameters are averaged after `step`, counted from 1."""
        if self._gradients_first and step <= self._begin:
            return False
        if self._rule == "torch":
            return (step - 1 - self._begin) % self.k_steps == 0
        return step <= self._begin or step - self.last_sync >= self.k_steps

    def _local_step(self, closure: Callable[[], float] | None) -> float | None:
        """The optimizer's step unless gradients have Inf or NaN; always increments the step
        count."""
        self.step_count += 1
        skip = False
        scale = getattr(self, "grad_scale", None)  # set by GradScaler.step()
        if scale is not None:
            for p in self._with_gradient():
                p.grad.mul_(1.0 / scale)
        if self._gradients_first and self.step_count <= self._begin:
            self._average_gradients()
            if hasattr(
                self, "found_inf"
            ):  # this rank's alone; now gradients are equal on all ranks
                skip = not all(bool(p.grad.isfinite().all()) for p in self._with_gradient())
        else:
            skip = bool(getattr(self, "found_inf", 0))
        result: float | None = None if skip else self.optimizer.step(closure)
        if self._gradients_first and self.step_count <= self._begin:
            self._keep(self._parameters)
        return result

    def _with_gradient(self) -> list[Any]:
        return [p for p in self._parameters if p.grad is not None]

    def _average_gradients(self) -> None:
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in mine]
        for p, mean in zip(self._parameters, coalesced.average(dense, self._group), strict=True):
            p.grad = mean

    def average(self) -> None:
        """Averages now, due or not, for example before evaluation or a checkpoint. Collective.

        Parameters, momentum and buffers are averaged in one call per dtype; nothing changes on
        failure.

        Raises:
            Error: as pycomm.all_reduce.
        """
        others = [*self._momenta(), *self._buffers]
        deltas = [s - p.detach() for s, p in zip(self._snapshot, self._parameters, strict=True)]
        means = coalesced.average([*deltas, *others], self._group)
        for other, mean in zip(others, means[len(deltas) :], strict=True):
            other.copy_(mean)
        if self.outer is not None and self.step_count > self._begin:
            self._step_outer(means[: len(deltas)])
        else:
            for p, s, mean in zip(self._parameters, self._snapshot, means, strict=False):
                p.data.copy_(s - mean)
        self._keep(self._parameters)

    def shrink(self, timeout_s: float | None = None) -> ShrinkResult:
        """Continues with the surviving ranks after a rank was lost. Collective over the survivors.

        All start from the last average that any survivor completed. A rank that did not complete it
        takes it over and loses its steps since the one before; the others keep theirs. A failed
        average is repeated at the next step that is due. If another rank dies meanwhile PeerLost is
        raised: call again.

        Args:
            timeout_s: as of Group.shrink.

        Returns:
            The survivors, and the step count, the same on all.

        Raises:
            GroupBroken, PeerLost, Timeout: as of Group.shrink.
        """
        before, self._group = self._group, self._group.shrink(timeout_s)
        last, source = most_advanced_rank(self.last_sync, self._group)
        self._follow(source, last)
        self.step_count, _ = most_advanced_rank(self.step_count, self._group)
        self.last_sync = last
        return shrink_result(before, self._group, self.step_count)

    def _follow(self, src: int, last: int) -> None:
        """Takes over from rank `src` the state after the average of step `last`, which is the same
        on all ranks; also the parameters if this rank did not complete that average.
        """
        coalesced.bcast_list_(self._snapshot, src, self._group)
        together = self._gradients_first and last <= self._begin  # gradients are averaged so far
        for optimizer in (self.optimizer if together else None, self.outer):
            if optimizer is not None:
                state = coalesced.bcast_value(optimizer.state_dict(), src, self._group)
                optimizer.load_state_dict(state)
        interval = torch.tensor([self.k_steps])
        collectives.broadcast(interval, src, group=self._group)
        self.k_steps = int(interval)
        if self.last_sync < last:
            for p, s in zip(self._parameters, self._snapshot, strict=True):
                p.data.copy_(s)

    def _keep(self, parameters: list[nn.Parameter]) -> None:
        """Makes these parameters, equal on all ranks, the snapshot."""
        for s, p in zip(self._snapshot, parameters, strict=True):
            s.copy_(p.detach())
        self.last_sync = self.step_count

    def _step_outer(self, deltas: list[Tensor]) -> None:
        """Steps from the snapshot with the mean difference as the gradient."""
        assert self.outer is not None
        gradients = [p.grad for p in self._parameters]
        for p, s, delta in zip(self._parameters, self._snapshot, deltas, strict=True):
            p.data.copy_(s)
            p.grad = delta
        self.outer.step()
        for p, gradient in zip(self._parameters, gradients, strict=True):
            p.grad = gradient

    def _momenta(self) -> list[Tensor]:
        """The optimizer's momentum buffers; zero if a skipped first step did not create them."""
        if not self._average_momentum:
            return []
        found = []
        for group in self.optimizer.param_groups:
            for p in group["params"] if group["momentum"] else ():
                state = self.optimizer.state[p]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(p)
                found.append(state["momentum_buffer"])
        return found

    def state_dict(self) -> dict[str, Any]:
        """This rank's state. Save the model and the optimizer as well, per rank: they differ
        between two averages.
        """
        return {
            "step_count": self.step_count,
            "last_sync": self.last_sync,
            "k_steps": self.k_steps,
            "snapshot": [s.clone() for s in self._snapshot],
            "outer": None if self.outer is None else self.outer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of state_dict().

        Args:
            state: of a model with the same shapes.

        Raises:
            InvalidArgument: the shapes differ.
        """
        shapes = [tuple(s.shape) for s in state["snapshot"]]
        if shapes != [tuple(s.shape) for s in self._snapshot]:
            raise InvalidArgument("invalid state: it belongs to a model with other parameters")
        for mine, saved in zip(self._snapshot, state["snapshot"], strict=True):
            mine.copy_(saved)
        self.step_count, self.last_sync = state["step_count"], state["last_sync"]
        self.k_steps = state["k_steps"]
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, momentum: str) -> None:
    if hasattr(model, "no_sync"):
        raise InvalidArgument(
            f"a {type(model).__name__} averages gradients at every step: pass its inner module"
        )
    if momentum not in ("local", "averaged"):
        raise InvalidArgument(f'invalid momentum: got {momentum!r}, expected "local" or "averaged"')
    if momentum == "averaged" and not isinstance(optimizer, torch.optim.SGD):
        raise InvalidArgument(f'momentum="averaged" requires SGD, got {type(optimizer).__name__}')
