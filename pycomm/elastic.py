"""The result of shrink() for a training loop: the new group and the agreed step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pycomm import collectives
from pycomm.group import Group

__all__ = ["ShrinkResult", "most_advanced_rank", "shrink_result"]


@dataclass(frozen=True)
class ShrinkResult:
    """The state of a training after shrink().

    Attributes:
        group: the group of the survivors.
        lost: the ranks that were lost, numbered as in the first group.
        step: completed steps, the same on all ranks.
        lost_residual_norm: with compression: estimated norm of the residual lost with the failed
            ranks (assumes the mean residual of the survivors); else 0.
    """

    group: Group
    lost: list[int]
    step: int
    lost_residual_norm: float = 0.0


def shrink_result(
    before: Group, group: Group, step: int, lost_residual_norm: float = 0.0
) -> ShrinkResult:
    """The result of shrinking `before` to `group`."""
    lost = [rank for rank in before.ranks if rank not in group.ranks]
    return ShrinkResult(group, lost, step, lost_residual_norm)


def most_advanced_rank(count: int, group: Group) -> tuple[int, int]:
    """The highest count, and the lowest rank that has it. Collective."""
    counts = collectives.all_gather(torch.tensor([count]), group=group).flatten().tolist()
    return max(counts), counts.index(max(counts))
