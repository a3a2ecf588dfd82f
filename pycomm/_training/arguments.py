"""Checks of arguments that are objects of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pycomm._arguments import elements, instance, real, refuse
from pycomm._core_api import arrays


def check_module(name: str, value: Any) -> None:
    """Raises InvalidArgument unless this is a module."""
    instance(name, value, nn.Module, "a torch.nn.Module")


def check_optimizer(name: str, value: Any) -> None:
    """Raises InvalidArgument unless this is an optimizer."""
    instance(name, value, torch.optim.Optimizer, "a torch optimizer")


def check_scaler(value: Any) -> None:
    """Raises InvalidArgument unless this is a loss scaler or None."""
    if value is not None:
        instance("scaler", value, torch.amp.GradScaler, "a torch.amp.GradScaler, or None")


def device_of(name: str, value: Any) -> torch.device:
    """A device of torch, also from its name or index."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError, ValueError):  # torch's text repeats the value
        refuse(name, value, "a device of torch")


def check_scalar(name: str, value: Any) -> None:
    """Raises InvalidArgument unless this is a number, or a tensor with one element."""
    if not isinstance(value, Tensor):
        real(name, value)
    elif arrays.check_tensor(name, value) and value.numel() != 1:
        refuse(name, value, "a number, or a tensor with one element")


def flat_tensor(name: str, value: Any) -> Tensor:
    """A dense tensor of one dimension."""
    arrays.check_tensor(name, value)
    if value.dim() != 1:
        refuse(name, value, "a tensor of one dimension")
    found: Tensor = value
    return found


def named_tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """Pairs of a name and a tensor, as of model.named_parameters(), as a list."""
    expected = "pairs of a name and a tensor, as of model.named_parameters()"
    found = elements(name, value, expected)
    for pair in found:
        if not isinstance(pair, tuple) or [type(one) is str for one in pair] != [True, False]:
            refuse(name, pair, expected)
        instance(name, pair[1], Tensor, expected)
    return found
