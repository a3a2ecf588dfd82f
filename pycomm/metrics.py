"""Metrics over all ranks, weighted by sample counts: equal to one process over all data.

Sums stay on the tensors' device; nothing is copied or sent before compute().
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pycomm import collectives
from pycomm._arguments import flag, integer, real, refuse
from pycomm._core_api import arrays
from pycomm.default_group import chosen
from pycomm.errors import InvalidArgument
from pycomm.group import Group

__all__ = ["Accuracy", "Mean", "accuracy"]

MOST_SAMPLES = 2**53  # that float64 counts


def accuracy(scores: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """The share of this rank's samples whose label is among the k classes with the highest scores.
    Does not communicate; `Accuracy` counts over all ranks.

    Args:
        scores: [n, classes]. With fewer than k classes every sample counts as a hit.
        labels: [n] or [n, 1], class indices.
        k: at least 1.

    Returns:
        A float32 scalar on the device of `scores`; NaN without samples.

    Raises:
        InvalidArgument: other shapes, or k below 1.
    """
    (hits,) = _hits(scores, labels, _checked([k]))
    return hits / len(labels)


def _checked(topk: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(topk, (list, tuple)) or not topk:
        refuse("topk", topk, "a list of integers from 1")
    return tuple(integer("topk", k, 1) for k in topk)


def _hits(scores: Tensor, labels: Tensor, topk: Sequence[int]) -> list[Tensor]:
    """For each k, how many labels are among the k highest scores."""
    for name, given in (("scores", scores), ("labels", labels)):
        if not isinstance(given, Tensor) or given.is_sparse or given.is_meta or given.is_complex():
            refuse(name, given, "a dense tensor with values")
    if scores.dim() != 2 or labels.shape not in ((len(scores),), (len(scores), 1)):
        raise InvalidArgument(
            f"invalid shapes: got scores {list(scores.shape)} and labels {list(labels.shape)}, "
            "expected [n, classes] and [n] or [n, 1]"
        )
    most = min(max(topk), scores.shape[1])
    hits = scores.detach().topk(most, 1).indices == labels.detach().reshape(-1, 1)
    return [hits[:, :k].any(1).sum() for k in topk]


class _Sums:
    """Sums of each rank, and their totals over all ranks."""

    def __init__(self, count: int, dtype: torch.dtype, every: int, group: Group | None) -> None:
        self._sums = torch.zeros(count, dtype=dtype)
        self._every, self._calls = integer("every", every, 1), 0
        self._group = None if group is None else chosen(group)

    def add(self, new: Tensor) -> None:
        if self._sums.device != new.device:
            self._sums = self._sums.to(new.device)
        self._sums += new

    def due(self, now: bool) -> bool:
        """Counts a call of compute(); whether it communicates."""
        self._calls += 1
        return flag("now", now) or self._calls % self._every == 0

    def total(self) -> list[float]:
        """Collective."""
        total = self._sums.cpu().clone()
        collectives.all_reduce(total, group=chosen(self._group))
        numbers: list[float] = total.tolist()
        return numbers

    def reset(self) -> None:
        self._sums.zero_()


class Mean:
    """The mean of values over all samples of all ranks since the last reset().

        loss_mean = Mean(every=10)
        loss_mean.update(loss.detach(), len(x));  value = loss_mean.compute()

    Args:
        every: compute() communicates at each `every`-th call, and else returns its last result.
        group: the group to call in; None: the default group.

    Raises:
        InvalidArgument: `every` is below 1.
    """

    def __init__(self, every: int = 1, group: Group | None = None) -> None:
        self._sums = _Sums(2, torch.float64, every, group)
        self._last = float("nan")

    def update(self, value: Tensor | float, count: int = 1) -> None:
        """Adds values.

        Args:
            value: the mean of `count` samples; or a tensor of any shape, each element of which is
                the mean of `count` samples.
            count: samples per element.

        Raises:
            InvalidArgument: `value` has no numbers, or `count` is negative or no integer.
            Unsupported: a tensor without values in memory, or of complex numbers.
        """
        if isinstance(value, (Tensor, np.ndarray)):
            arrays.view(value)  # raises for values that are no real numbers
        else:
            value = real("value", value)
        count = integer("count", count, 0, MOST_SAMPLES)
        values = torch.as_tensor(value).detach().to(torch.float64)
        weight = values.new_tensor(float(count * values.numel()))
        self._sums.add(torch.stack([values.sum() * count, weight]))

    def compute(self, now: bool = False) -> float:
        """The mean; NaN before any update. Collective at each `every`-th call, and with `now`.

        Args:
            now: communicate in this call; the same on every rank.

        Raises:
            InvalidArgument: `now` is neither True nor False.
            Error: as pycomm.all_reduce, if it communicates.
        """
        if self._sums.due(now):
            total, count = self._sums.total()
            self._last = total / count if count else float("nan")
        return self._last

    def reset(self) -> None:
        """Clears the sums."""
        self._sums.reset()


class Accuracy:
    """The share of samples whose label is among the k classes with the highest scores.

    Args:
        topk: the values of k, in the order of compute()'s result; each at least 1.
        every, group: as for Mean.

    Raises:
        InvalidArgument: `every` or a k is below 1, or there is no k.
    """

    def __init__(
        self, topk: Sequence[int] = (1, 5), every: int = 1, group: Group | None = None
    ) -> None:
        self._topk = _checked(topk)
        self._sums = _Sums(len(self._topk) + 1, torch.int64, every, group)
        self._last = (float("nan"),) * len(self._topk)

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Adds a batch.

        Args:
            scores: [n, classes]. With fewer than k classes every sample counts as a hit.
            labels: [n] or [n, 1], class indices.

        Raises:
            InvalidArgument: other shapes.
        """
        found = _hits(scores, labels, self._topk)
        self._sums.add(torch.stack([*found, found[0].new_tensor(len(labels))]))

    def compute(self, now: bool = False) -> tuple[float, ...]:
        """The shares by k, each from 0 to 1; NaN and communication as for Mean.

        Args:
            now: as for Mean.

        Raises:
            InvalidArgument: as for Mean.
            Error: as pycomm.all_reduce, if it communicates.
        """
        if self._sums.due(now):
            *hits, count = self._sums.total()
            self._last = tuple(number / count if count else float("nan") for number in hits)
        return self._last

    def reset(self) -> None:
        """Clears the sums."""
        self._sums.reset()
