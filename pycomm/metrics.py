"""Metrics over all ranks, weighed by true counts: what one process over all data would get.

Sums stay where the tensors are; nothing is fetched or sent before compute(). Called by users.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pycomm import collectives
from pycomm.errors import InvalidArgument
from pycomm.group import Group, default

__all__ = ["Accuracy", "Mean"]


class _Sums:
    """Numbers that add up on each rank, and their totals over all."""

    def __init__(self, count: int, dtype: torch.dtype, every: int, group: Group | None) -> None:
        if every < 1:
            raise InvalidArgument(f"every={every}: at least 1")
        self._sums = torch.zeros(count, dtype=dtype)
        self._every, self._calls, self._group = every, 0, group

    def add(self, new: Tensor) -> None:
        if self._sums.device != new.device:
            self._sums = self._sums.to(new.device)
        self._sums += new

    def due(self, now: bool) -> bool:
        """Whether this call of compute() is one that communicates."""
        self._calls += 1
        return now or self._calls % self._every == 0

    def total(self) -> list[float]:
        """Collective."""
        total = self._sums.cpu().clone()
        collectives.all_reduce(total, group=self._group or default())
        numbers: list[float] = total.tolist()
        return numbers

    def reset(self) -> None:
        self._sums.zero_()


class Mean:
    """The mean of values over all samples of all ranks since the last reset().

        loss_mean = Mean(every=10)
        loss_mean.update(loss.detach(), len(x));  value = loss_mean.compute()

    Args:
        every: compute() communicates at each `every`-th call, and else gives what it gave last.
        group: whose ranks; None is the default group.
    """

    def __init__(self, every: int = 1, group: Group | None = None) -> None:
        self._sums = _Sums(2, torch.float64, every, group)
        self._last = float("nan")

    def update(self, value: Tensor | float, count: int = 1) -> None:
        """Takes the mean `value` of `count` samples, or a tensor of several values of which each
        stands for `count` samples."""
        values = torch.as_tensor(value).detach().to(torch.float64)
        weight = values.new_tensor(float(count * values.numel()))
        self._sums.add(torch.stack([values.sum() * count, weight]))

    def compute(self, now: bool = False) -> float:
        """The mean; NaN before there is any. Collective where it communicates: at each `every`-th
        call, and with `now`."""
        if self._sums.due(now):
            total, count = self._sums.total()
            self._last = total / count if count else float("nan")
        return self._last

    def reset(self) -> None:
        """Forgets what was taken."""
        self._sums.reset()


class Accuracy:
    """The share of samples whose label is among the k classes with the highest scores.

    Args:
        topk: for which k, in the order in which compute() gives them.
        every, group: as for Mean.
    """

    def __init__(
        self, topk: Sequence[int] = (1, 5), every: int = 1, group: Group | None = None
    ) -> None:
        if not topk or min(topk) < 1:
            raise InvalidArgument(f"topk={topk}: numbers from 1 on")
        self._topk = tuple(topk)
        self._sums = _Sums(len(self._topk) + 1, torch.int64, every, group)
        self._last = (float("nan"),) * len(self._topk)

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Takes scores [n, classes] and labels [n]. With fewer classes than k all count as hits."""
        if scores.dim() != 2 or labels.shape != scores.shape[:1]:
            raise InvalidArgument(
                f"scores {list(scores.shape)} and labels {list(labels.shape)}: [n, classes] and [n]"
            )
        most = min(max(self._topk), scores.shape[1])
        hits = scores.detach().topk(most, 1).indices == labels.detach()[:, None]
        found = [hits[:, :k].any(1).sum() for k in self._topk]
        self._sums.add(torch.stack([*found, found[0].new_tensor(len(labels))]))

    def compute(self, now: bool = False) -> tuple[float, ...]:
        """The shares by k, from 0 to 1; NaN and exchange as for Mean."""
        if self._sums.due(now):
            *hits, count = self._sums.total()
            self._last = tuple(number / count if count else float("nan") for number in hits)
        return self._last

    def reset(self) -> None:
        """Forgets what was taken."""
        self._sums.reset()
