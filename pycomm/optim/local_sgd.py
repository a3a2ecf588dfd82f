"""LocalSGD: ranks step alone and average their parameters now and then.

    step      1   2   3   4   5   6   7   8   9  10  11      begin_step 3, k_steps 4
    average   x   x   x               x               x      rule "paddle"
                              (4)             (8)            rule "torch" averages here instead

Which averages a rank takes part in depends on its count of steps alone, never on its data, so no
rank waits for one that skipped a step. The adaptive form is adaptive.py. Called by users.
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
    """Steps an optimizer of torch's and averages parameters over all ranks when it is time.

        local = pycomm.LocalSGD(model, optimizer, k_steps=4, begin_step=100)
        loss.backward();  local.step()              # instead of optimizer.step()
        scaler.step(local);  scaler.update()        # the same with a loss scale

    The average is p = snapshot - mean(snapshot - p), with the snapshot that all ranks share since
    the last one; the same bits on all ranks. At construction all take rank 0's parameters and
    buffers. With an optimizer other than SGD, or rule "torch", gradients are averaged instead while
    step <= begin_step, as averaging what Adam made is not Adam.

    Args:
        model: the module itself, not one that averages gradients already.
        optimizer: any of torch's, over the model's parameters.
        k_steps: steps between two averages after begin_step; at least 1.
        begin_step: up to this step, counted from 1, ranks average every step; at least 1.
        rule: "paddle" averages k_steps after the last average; "torch" after steps begin_step + 1,
            begin_step + 1 + k_steps, ...
        momentum: "local", or "averaged" with the parameters (torch.optim.SGD only).
        buffers: average floating buffers (batch norm's) too.
        outer: an optimizer of torch's over the same parameters that steps after each average beyond
            begin_step, with mean(snapshot - p) for a gradient (DiLoCo, arXiv 2311.08105).
        group: whose ranks; None is the default group.

    Attributes:
        step_count: steps so far; skipped ones count.
        last_sync: the step after which parameters were last averaged.
        k_steps: the present interval.
    """

    _step_supports_amp_scaling = True  # GradScaler.step() calls step() always and tells it of Inf

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
            raise InvalidArgument(f"k_steps={k_steps}, begin_step={begin_step}: at least 1 each")
        if rule not in ("paddle", "torch"):
            raise InvalidArgument(f'rule={rule!r}: "paddle" or "torch"')
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
        """The optimizer's, where a GradScaler looks for gradients."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of this rank and, when it is time, the average. Returns what `closure` does."""
        result = self._local_step(closure)
        if self.is_due(self.step_count):
            self.average()
        return result

    def is_due(self, step: int) -> bool:
        """Whether parameters are averaged after this step, which follows `last_sync`."""
        if self._gradients_first and step <= self._begin:
            return False
        if self._rule == "torch":
            return (step - 1 - self._begin) % self.k_steps == 0
        return step <= self._begin or step - self.last_sync >= self.k_steps

    def _local_step(self, closure: Callable[[], float] | None) -> float | None:
        """The optimizer's step, unless there is Inf or NaN; the count grows in any case."""
        self.step_count += 1
        skip = False
        scale = getattr(self, "grad_scale", None)  # set by GradScaler.step()
        if scale is not None:
            for p in self._with_gradient():
                p.grad.mul_(1.0 / scale)
        if self._gradients_first and self.step_count <= self._begin:
            self._average_gradients()
            if hasattr(self, "found_inf"):  # of this rank alone; now all have the same
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
        """Collective. Averages now, due or not, as before the model is judged or stored.

        Parameters, momentum and buffers go in one call per dtype; nothing changes if it fails.
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
        """Collective over the survivors, after a rank was lost: goes on with those that are left.

        All stand on the last average that one of them has completed: who has not got it, as it
        failed there, takes it over, and its steps since then are gone; the others keep theirs. The
        average that failed comes with the next step that is due. A further death meanwhile raises
        PeerLost: call again.

        Args:
            timeout_s: as of Group.shrink.

        Returns:
            Who is left, and the count of steps, the same on all.
        """
        before, self._group = self._group, self._group.shrink(timeout_s)
        last, source = most_advanced_rank(self.last_sync, self._group)
        self._follow(source, last)
        self.step_count, _ = most_advanced_rank(self.step_count, self._group)
        self.last_sync = last
        return shrink_result(before, self._group, self.step_count)

    def _follow(self, src: int, last: int) -> None:
        """Takes over from rank `src` what is the same on all after the average of step `last`; the
        parameters too if this rank has not got it."""
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
        """These are now the same on all ranks."""
        for s, p in zip(self._snapshot, parameters, strict=True):
            s.copy_(p.detach())
        self.last_sync = self.step_count

    def _step_outer(self, deltas: list[Tensor]) -> None:
        """From the snapshot, with the mean way as its gradient."""
        assert self.outer is not None
        gradients = [p.grad for p in self._parameters]
        for p, s, delta in zip(self._parameters, self._snapshot, deltas, strict=True):
            p.data.copy_(s)
            p.grad = delta
        self.outer.step()
        for p, gradient in zip(self._parameters, gradients, strict=True):
            p.grad = gradient

    def _momenta(self) -> list[Tensor]:
        """The optimizer's velocities, zero where a skipped first step has made none yet."""
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
        """This rank's; beside it save the model and the optimizer, which differ by rank between
        two averages."""
        return {
            "step_count": self.step_count,
            "last_sync": self.last_sync,
            "k_steps": self.k_steps,
            "snapshot": [s.clone() for s in self._snapshot],
            "outer": None if self.outer is None else self.outer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where state_dict() was taken. InvalidArgument where the shapes differ."""
        shapes = [tuple(s.shape) for s in state["snapshot"]]
        if shapes != [tuple(s.shape) for s in self._snapshot]:
            raise InvalidArgument("the state is of a model with other parameters")
        for mine, saved in zip(self._snapshot, state["snapshot"], strict=True):
            mine.copy_(saved)
        self.step_count, self.last_sync = state["step_count"], state["last_sync"]
        self.k_steps = state["k_steps"]
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, momentum: str) -> None:
    if hasattr(model, "no_sync"):
        raise InvalidArgument(
            f"a {type(model).__name__} averages gradients at every step: pass the module inside it"
        )
    if momentum not in ("local", "averaged"):
        raise InvalidArgument(f'momentum={momentum!r}: "local" or "averaged"')
    if momentum == "averaged" and not isinstance(optimizer, torch.optim.SGD):
        raise InvalidArgument(f'momentum="averaged" is for SGD, not {type(optimizer).__name__}')
