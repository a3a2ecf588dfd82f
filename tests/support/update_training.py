"""Helpers of the tests of LocalSGD with compressed updates."""

from typing import Any

import torch
from torch import Tensor, nn

import pycomm

SMALL = pycomm.TopK(density=0.2, group=4)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    given = {"lr": 0.01, "betas": (0.0, 0.99), "weight_decay": 0.1, **options}
    return torch.optim.AdamW(model.parameters(), **given)


def residuals(local: pycomm.LocalSGD) -> list[Tensor]:
    return [x.clone() for x in local.state_dict()["residual"]]
