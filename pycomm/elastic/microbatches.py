"""A constant number of microbatches in each step, and random numbers that are independent of
ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pycomm._arguments import integer, integers, mapping, refuse
from pycomm._training.arguments import flat_tensor
from pycomm.default_group import chosen, default
from pycomm.errors import InvalidArgument
from pycomm.group import Group


@dataclass(frozen=True)
class Microbatch:
    """A microbatch of a step.

    Attributes:
        index: its number in the step, from 0 to count - 1.
        weight: the factor of its loss: then the mean of all ranks' gradients is the mean over the
            microbatches.
        last: it is this rank's last one in the step: its backward pass exchanges the gradients.
    """

    index: int
    weight: float
    last: bool


class Microbatches:
    """Divides a constant number of microbatches in each step among the ranks that there are.

        for one in microbatches.of_step(step):
            x, y = batch(step, one.index)
            with contextlib.nullcontext() if one.last else model.no_sync():
                (loss(model(x), y) * one.weight).backward()

    After a rank was lost, the others take its microbatches; after it was replaced, its rank has
    them again. The gradient of a step is the same in both cases, except for rounding. Rank r of N
    gets those from r * count // N to (r + 1) * count // N - 1.

    Args:
        count: microbatches in a step, at least the number of ranks.
        seed: sets torch's random state before each microbatch, by manual_seed(seed, step, index),
            so that dropout is the same on any rank. None: does not change it.
        group: the ranks; None: the default group in each step. Set the attribute `group` after the
            group was replaced.

    Raises:
        InvalidArgument: `count` is below 1, or another argument is invalid.
    """

    def __init__(self, count: int, seed: int | None = None, group: Group | None = None) -> None:
        if group is not None:
            chosen(group)  # raises for another object
        self.count = integer("count", count, 1)
        self.seed = None if seed is None else integer("seed", seed)
        self.group = group

    def of_step(self, step: int) -> Iterator[Microbatch]:
        """This rank's microbatches in a step, in ascending order.

        Args:
            step: its number, the same on every rank.

        Raises:
            InvalidArgument: `step` is no integer, or the group has more ranks than there are
                microbatches.
        """
        step = integer("step", step)
        group = self.group or default()
        rank, size = group.rank, group.size
        if size > self.count:
            raise InvalidArgument(
                f"{self.count} microbatches cannot be divided among {size} ranks: expected at "
                "least one for each"
            )
        end = (rank + 1) * self.count // size
        for index in range(rank * self.count // size, end):
            if self.seed is not None:
                manual_seed(self.seed, step, index)
            yield Microbatch(index, size / self.count, index == end - 1)


def manual_seed(seed: int, *numbers: int) -> None:
    """Seeds torch's random generators, on the CPU and GPUs, from several integers.

    A process that takes the place of another continues with the same random numbers if each step
    begins with such a call.

    Args:
        seed: of the run.
        numbers: such as the step, and the rank or the microbatch.

    Raises:
        InvalidArgument: one of them is no integer.
    """
    text = " ".join(map(str, [integer("seed", seed), *integers("numbers", numbers)]))
    torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


class RandomState:
    """torch's random state as an argument of replace(), if it is the same on all ranks.

    A rank whose state differs takes that of the most advanced one. If ranks draw different numbers,
    call manual_seed(seed, step, rank) in each step instead.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states of the CPU's generator and, if CUDA is in use, of the current device's."""
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types
        cuda = torch.cuda.get_rng_state() if used else None
        return {"cpu": torch.get_rng_state(), "cuda": cuda}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets them.

        Args:
            state: of state_dict().

        Raises:
            InvalidArgument: it is not such a state.
        """
        mapping("state", state, ("cpu", "cuda"))
        for name, value in state.items():
            if value is not None or name == "cpu":
                flat_tensor(f"state[{name!r}]", value)
        try:
            torch.set_rng_state(state["cpu"])
        except (TypeError, RuntimeError):  # the generator's own check of dtype, size and content
            refuse("state['cpu']", state["cpu"], "a state of torch's generator")
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"])
