"""What a training agrees on when its group has shrunk. Called by parallel and optim."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pycomm import collectives
from pycomm.group import Group

__all__ = ["ShrinkResult", "most_advanced_rank", "shrink_result"]


@dataclass(frozen=True)
class ShrinkResult:
    """What is left of a training.

    Attributes:
        group: those who go on.
        lost: who does not, as ranks of the first group.
        step: how many steps have been completed, the same on all.
        lost_residual_norm: what those who are gone still owed of their gradients goes with them:
            the norm of it, if they owed as much as those who are left do in the mean (DGC; else 0).
    """

    group: Group
    lost: list[int]
    step: int
    lost_residual_norm: float = 0.0


def shrink_result(
    before: Group, group: Group, step: int, lost_residual_norm: float = 0.0
) -> ShrinkResult:
    """What is left of `before`."""
    lost = [rank for rank in before.ranks if rank not in group.ranks]
    return ShrinkResult(group, lost, step, lost_residual_norm)


def most_advanced_rank(count: int, group: Group) -> tuple[int, int]:
    """Collective. The highest count, and the lowest rank that has it."""
    counts = collectives.all_gather(torch.tensor([count]), group=group).flatten().tolist()
    return max(counts), counts.index(max(counts))
