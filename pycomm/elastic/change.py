"""How the wrappers of a training get from a group to the one that takes its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pycomm import collectives
from pycomm.errors import InvalidArgument
from pycomm.group import Group
from pycomm.objects import all_gather_object


@dataclass(frozen=True)
class ShrinkResult:
    """The state of a training after shrink() or replace(), the same on all ranks.

    Attributes:
        group: the new group; `group.joined` lists the ranks of new processes.
        lost: the ranks that were lost, numbered as in the first group.
        step: completed steps.
        lost_residual_norm: with compression: estimated norm of the residual lost with the failed
            ranks (assumes the mean residual of the survivors); else 0.
    """

    group: Group
    lost: list[int]
    step: int
    lost_residual_norm: float = 0.0


@dataclass(frozen=True)
class GroupChange:
    """A group that takes the place of another, and which of its ranks have the state.

    Attributes:
        before: the group to which the state of this rank belongs.
        group: the new group.
        counts: what the most advanced ranks completed, compared in this order.
        source: the lowest of these ranks.
        new: the ranks without a state, which joined.
        lost: the ranks that were lost, numbered as in the first group.
        lost_states: how many ranks were lost that had a state.
    """

    before: Group
    group: Group
    counts: tuple[int, ...]
    source: int
    new: list[int]
    lost: list[int]
    lost_states: int

    @property
    def is_new(self) -> bool:
        """Whether this rank has no state."""
        return self.group.rank in self.new

    def lost_norm(self, squares: float, lost: int | None = None) -> float:
        """Collective. The estimated norm of the lost residuals.

        Args:
            squares: the sum of the squares of this rank's residual.
            lost: the number of lost residuals; None: `lost_states`.
        """
        word = torch.tensor([squares], dtype=torch.float64)
        total = float(collectives.all_reduce(word, group=self.group))
        lost = self.lost_states if lost is None else lost
        return math.sqrt(total / (self.group.size - len(self.new)) * lost)

    def result(self, step: int, lost_residual_norm: float) -> ShrinkResult:
        """What the wrapper returns."""
        return ShrinkResult(self.group, self.lost, step, lost_residual_norm)


class Membership:
    """The group of a wrapper, and whether this rank has the state of the others.

    Attributes:
        group: the current group.
        new: this process joined, and has not received the state.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.new = group, group.rank in group.joined
        self._before = group  # to which the state belongs, also if a change fails
        self._lost: set[int] = set()  # since then
        self._unused = self.new  # the others made this group, and wait in replace()

    def check(self, name: str) -> None:
        """Raises InvalidArgument if this rank has no state. `name`: of the wrapper, for errors."""
        if self.new:
            raise InvalidArgument(
                f"{name}: this process joined the group and has not received the state of the "
                "others: call replace() first, as they do"
            )

    def change(self, make: Callable[[Group], Group], counts: tuple[int, ...]) -> GroupChange:
        """Collective over the survivors and the processes that joined. The next group.

        Args:
            make: makes it, unless the group was replaced already, or this process joined it.
            counts: what this rank completed.

        Raises:
            InvalidArgument: all ranks joined, so none has the state.
            Error: as `make`, or as pycomm.all_reduce.
        """
        last, before = self.group, self._before
        if not self._unused:
            self.group = last.successor or make(last)
        self._unused = False
        group = self.group
        replaced = {group.ranks[rank] for rank in group.joined}
        self._lost |= {rank for rank in last.ranks if rank not in group.ranks or rank in replaced}
        mine = None if self.new else (counts, sorted(self._lost), before.size)
        rows = all_gather_object(mine, group=group)
        new = [rank for rank, row in enumerate(rows) if row is None]
        if len(new) == group.size:
            raise InvalidArgument("replace: all ranks joined: none has the state of the training")
        most = max(row[0] for row in rows if row is not None)
        source = next(rank for rank, row in enumerate(rows) if row is not None and row[0] == most)
        _, lost, size = rows[source]
        lost_states = size - (group.size - len(new))
        return GroupChange(before, group, most, source, new, lost, lost_states)

    def complete(self) -> None:
        """This rank has the state, which now belongs to the current group."""
        self._before, self._lost, self.new = self.group, set(), False
