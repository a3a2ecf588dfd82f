"""LocalSGD with an interval that depends on the loss.

Source: Wang and Joshi, "Adaptive Communication Strategies" (ADACOMM, arXiv 1810.08313). As in
Paddle, whose rule is the default, the intervals count steps and are not halved.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from pycomm import collectives
from pycomm._arguments import check_fields, integer, list_of, number, one_of, refuse
from pycomm._training.arguments import check_scalar
from pycomm.errors import InvalidArgument
from pycomm.optim.local_sgd import LocalSGD

RULES = ("paddle", "paper")


def interval(change: float, init_k_steps: int, max_k_steps: int, rule: str) -> int:
    """Steps until the next average.

    Args:
        change: (lr_0 * loss) / (lr * loss_0); the interval grows with it.
        init_k_steps: the interval at change 1 under the paper's rule.
        max_k_steps: the upper limit; the lower limit is 1.
        rule: "paddle": sqrt(change * init_k_steps); "paper": sqrt(change) * init_k_steps.

    Returns:
        Steps, rounded up.
    """
    if rule == "paddle":
        steps = math.sqrt(change * init_k_steps)
    else:
        steps = math.sqrt(change) * init_k_steps
    return min(max(math.ceil(steps - 1e-9), 1), max_k_steps)


def _reference(name: str, value: Any) -> None:
    """Checks loss_0 and lr_0 of a state, or None."""
    if value is None:
        return
    list_of(number)(name, value)
    if len(value) != 2:
        refuse(name, value, "two numbers, or None")


class AdaptiveLocalSGD(LocalSGD):
    """LocalSGD with an adaptive interval (ADACOMM: Wang and Joshi, arXiv 1810.08313).

    The interval grows as the learning rate decreases and shrinks as the loss decreases.

        local = pycomm.AdaptiveLocalSGD(model, optimizer, init_k_steps=4, begin_step=100)
        loss.backward();  local.step(loss)        # or scaler.step(local, loss)

    Up to begin_step every step averages and the interval is constant. After it rank 0 computes the
    interval at each average, in float64, from its learning rate (of the first parameter group) and
    the mean loss over the ranks with a finite loss.

    Args:
        model: the module, as in LocalSGD.
        optimizer: a torch optimizer over the model's parameters.
        init_k_steps: initial interval in steps, 1 <= init_k_steps <= max_k_steps.
        begin_step: up to this step, counted from 1, ranks average every step; at least 1.
        max_k_steps: the upper limit of the interval, in steps.
        rule: "paddle": sqrt(change * init_k_steps) steps; "paper": sqrt(change) * init_k_steps;
            both with change = (lr_0 * loss) / (lr * loss_0), rounded up.
        reference: the step that defines loss_0 and lr_0: the "first", or "begin" for begin_step,
            which suits a learning rate with warm-up.
        options: momentum, buffers, outer, group, compression and clip_norm as in LocalSGD, whose
            rule is "paddle".

    Raises:
        InvalidArgument: an argument outside its range, or as LocalSGD.
    """

    _numbers = "k_steps", "_reference"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        init_k_steps: int = 1,
        begin_step: int = 1,
        max_k_steps: int = 16,
        rule: str = "paddle",
        reference: str = "first",
        **options: Any,
    ) -> None:
        one_of("rule", rule, RULES)
        one_of("reference", reference, ("first", "begin"))
        max_k_steps = integer("max_k_steps", max_k_steps, 1)
        init_k_steps = integer("init_k_steps", init_k_steps, 1, max_k_steps)
        super().__init__(model, optimizer, init_k_steps, begin_step, **options)
        self._init_k, self._max_k, self._interval_rule = init_k_steps, max_k_steps, rule
        self._reference_step = 1 if reference == "first" else begin_step
        self._reference: tuple[float, float] | None = None  # loss_0 and lr_0 of rank 0

    def step(self, loss: float | Tensor) -> float | None:  # type: ignore[override]  # the rule needs a loss
        """One step of this rank; if due, averages and computes the next interval.

        Args:
            loss: this rank's loss of the step, a number or a tensor with one element of any dtype.

        Returns:
            What the optimizer's step() returns, None if the step was skipped.

        Raises:
            InvalidArgument: `loss` has another type or several elements; nothing changes. Or, on
                every rank: no rank has a finite loss, or one of loss_0, lr_0, loss
                and lr is not above 0, so the interval is undefined.
            PeerLost, Timeout, Mismatch: errors of the average.
        """
        check_scalar("loss", loss)
        result = self._local_step(None)
        step = self.step_count
        due = self._average_if_due()
        if step == self._reference_step:
            self._reference = self._measure(loss)
        elif due and step > self._begin:
            self._choose(*self._measure(loss))
        return result

    def _measure(self, loss: float | Tensor) -> tuple[float, float]:
        """Collective. The mean of the finite losses, and rank 0's learning rate."""
        mine = float(loss.detach() if isinstance(loss, Tensor) else loss)
        finite = math.isfinite(mine)
        rate = float(self.param_groups[0]["lr"]) if self._group.rank == 0 else 0.0
        word = torch.tensor([mine if finite else 0.0, float(finite), rate], dtype=torch.float64)
        collectives.all_reduce(word, group=self._group)
        total, count, rate = word.tolist()
        return (total / count if count else math.nan), rate

    def _choose(self, loss: float, rate: float) -> None:
        """Collective. Sets k_steps to the interval that rank 0 computes."""
        assert self._reference is not None
        loss_0, rate_0 = self._reference
        if not (loss_0 > 0 and loss > 0 and rate > 0 and rate_0 > 0):  # NaN fails too
            raise InvalidArgument(
                f"no interval follows from loss {loss} at learning rate {rate} and loss "
                f"{loss_0} at {rate_0} in step {self._reference_step}: all must be above 0"
            )
        steps = torch.zeros(1, dtype=torch.int64)
        if self._group.rank == 0:
            change = (rate_0 * loss) / (rate * loss_0)
            steps[0] = interval(change, self._init_k, self._max_k, self._interval_rule)
        collectives.broadcast(steps, 0, group=self._group)
        self.k_steps = int(steps.item())

    def state_dict(self) -> dict[str, Any]:
        """The state of LocalSGD, and loss_0 and lr_0 under "reference"."""
        return {**super().state_dict(), "reference": self._reference}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state.

        Args:
            state: from state_dict() of this class.

        Raises:
            InvalidArgument: as LocalSGD.load_state_dict; or the state is not of this class.
        """
        check_fields("state", state, {"reference": _reference})
        super().load_state_dict(state)
        self._reference = None if state["reference"] is None else tuple(state["reference"])
