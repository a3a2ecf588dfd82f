"""Decoupled weight decay p *= 1 - lr * weight_decay, taken out of an optimizer's step.

With compression it is no part of the updates that ranks exchange: every rank applies it to the
shared parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


def _decoupled_groups(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """The parameter groups with decoupled weight decay, as far as torch's options tell."""
    for group in optimizer.param_groups:
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        if decoupled and group.get("weight_decay"):
            yield group


@contextlib.contextmanager
def without_decay(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The optimizer's decoupled weight decay is 0 in the block."""
    hidden = [(group, group["weight_decay"]) for group in _decoupled_groups(optimizer)]
    for group, _ in hidden:
        group["weight_decay"] = 0.0
    try:
        yield
    finally:
        for group, decay in hidden:
            group["weight_decay"] = decay


def multiply_factors(
    factors: list[float], optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
) -> None:
    """Multiplies the factor of each parameter by that of one step.

    Args:
        factors: of `parameters`, in place.
        optimizer: its groups have learning rate and weight decay.
        parameters: those that ranks share.
    """
    groups = list(_decoupled_groups(optimizer))
    places = {parameter: i for i, parameter in enumerate(parameters)} if groups else {}
    for group in groups:
        factor = 1.0 - float(group["lr"]) * float(group["weight_decay"])
        for parameter in group["params"]:
            if parameter in places:
                factors[places[parameter]] *= factor
