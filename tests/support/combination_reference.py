"""One process that trains a plan of combinations.py with the gradients of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from combination_runs import Record, Tensors, optimizer_of, scaler_of, split
from combinations import NEVER, Model, Plan, inputs
from torch import Tensor, nn

# Of the largest value: sums of some hundred terms, in another order.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 2e-5, torch.bfloat16: 4e-2}


def close(got: Tensor, wanted: Tensor, plan: Plan, slack: float, what: str) -> None:
    if not wanted.numel():
        return
    reach = max(float(wanted.abs().max()), float(got.abs().max()), 1e-2)
    difference = float((got - wanted).abs().max())
    limit = TOLERANCE[plan.dtype] * reach + slack
    assert difference <= limit, f"differ by {difference}, allowed {limit}: {what}"


def follows_one_process(plan: Plan) -> bool:
    """Whether one process with all batches takes the same steps."""
    options, branch = plan.options, {"branch", "branch first", "norm"} & set(plan.parts)
    if plan.dtype == torch.bfloat16 or not plan.to_none or "norm" in plan.parts:
        return False
    if plan.kind == "dgc":
        return options["rampup_begin_step"] == NEVER and options["clip_norm"] is None
    if plan.kind == "local":
        averaging = "begin" if plan.optimizers[0]["name"] == "adamw" else options["rule"]
        if averaging in ("begin", "torch") or plan.overflows or branch:
            return False
        return options["k_steps"] == 1 and options["clip_norm"] is None and "outer" not in options
    return plan.kind == "dense"


def compare_with_one_process(plan: Plan, records: list[list[Record]]) -> None:
    """One process that adds the gradients of all ranks."""
    wanted = one_process(plan)
    joined = [record for record in records[0] if record.step < 0]
    end = joined[-1] if plan.join else records[0][-1]
    for name, x in wanted.items():
        close(end.after[name].double(), x.double(), plan, 2e-5, f"{name} of one process")


def one_process(plan: Plan) -> Tensors:
    module, scaler = Model(plan), scaler_of(plan)
    named: dict[str, nn.Parameter] = dict(module.named_parameters())
    optimizers = [
        optimizer_of(options, [(n, named[n]) for n in names])
        for options, names in zip(plan.optimizers, split(plan, named), strict=True)
    ]
    for epoch, counts in enumerate(plan.epochs):
        steps = plan.steps_of(epoch)
        for number in steps:
            if number >= plan.frozen_from and "late" in plan.parts:
                module.late.requires_grad_(False)
            active = [r for r, count in enumerate(counts) if number - steps.start < count]
            for optimizer in optimizers:
                optimizer.zero_grad()
            accumulate(plan, module, scaler, number, active)
            step_all(plan, named, optimizers, scaler, number, active)
    return {name: p.detach() for name, p in named.items()}


def accumulate(
    plan: Plan, module: nn.Module, scaler: Any, number: int, active: Sequence[int]
) -> None:
    for rank in active:
        for micro in range(plan.micro):
            loss = module(*inputs(plan, rank, number, micro)) / plan.micro / plan.ranks
            (loss if scaler is None else scaler.scale(loss)).backward()


def step_all(
    plan: Plan,
    named: dict[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: Any,
    number: int,
    active: Sequence[int],
) -> None:
    wrong = plan.overflows.get(number)
    if wrong is not None and wrong[0] in active:
        infinite = [named[wrong[1]]]
        if plan.kind == "dgc":  # every optimizer skips
            infinite = [p for p in named.values() if p.grad is not None]
        for p in infinite:
            p.grad = torch.full_like(p, math.inf)
    if plan.clip is not None:
        for optimizer in optimizers if scaler is not None else ():
            scaler.unscale_(optimizer)
        found = [p for p in named.values() if p.grad is not None and not p.grad.is_sparse]
        nn.utils.clip_grad_norm_(found, plan.clip)
    for optimizer in optimizers:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
