"""pycomm.elastic: a constant number of microbatches, and random numbers without ranks."""

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import SETTINGS
from small_models import seeded

import pycomm
from pycomm import Group, elastic
from pycomm.errors import InvalidArgument
from pycomm.testing import run_ranks


class Fake:
    """The rank and size of a group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@SETTINGS
@given(st.integers(1, 60), st.data())
def test_each_microbatch_is_on_one_rank(count: int, data: Any) -> None:
    size = data.draw(st.integers(1, count))
    batches = elastic.Microbatches(count)
    indices, weights = [], []
    for rank in range(size):
        batches.group = Fake(rank, size)  # type: ignore[assignment]  # has what is used
        mine = list(batches.of_step(0))
        assert [one.last for one in mine] == [False] * (len(mine) - 1) + [True]
        indices += [one.index for one in mine]
        weights += [one.weight for one in mine]
    assert indices == list(range(count))
    assert sum(weights) / size == pytest.approx(1)


def test_invalid_counts_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="count: got 0, expected an integer from 1"):
        elastic.Microbatches(0)
    batches = elastic.Microbatches(2)
    batches.group = Fake(0, 3)  # type: ignore[assignment]  # as above
    with pytest.raises(InvalidArgument, match="2 microbatches cannot be divided among 3 ranks"):
        next(batches.of_step(0))


def test_random_numbers_depend_on_seed_step_and_microbatch_only() -> None:
    def drawn(seed: int, rank: int, size: int) -> dict[tuple[int, int], float]:
        batches = elastic.Microbatches(6, seed)
        batches.group = Fake(rank, size)  # type: ignore[assignment]  # as above
        return {
            (step, one.index): float(torch.rand(()))
            for step in range(3)
            for one in batches.of_step(step)
        }

    whole = drawn(5, 0, 1)
    assert len(set(whole.values())) == 18
    assert whole == {key: x for rank in range(4) for key, x in drawn(5, rank, 4).items()}
    assert not set(whole.values()) & set(drawn(6, 0, 1).values())


def test_random_state_is_restored() -> None:
    state = elastic.RandomState()
    torch.manual_seed(3)
    saved = state.state_dict()
    first = torch.rand(5)
    state.load_state_dict(saved)
    assert torch.equal(torch.rand(5), first)


def gradient(group: Group) -> torch.Tensor:
    model = seeded(torch.nn.Linear(9, 4), 0)
    parallel = pycomm.DataParallel(model)
    for one in elastic.Microbatches(6, group=group).of_step(0):
        made = torch.Generator().manual_seed(one.index)
        with contextlib.nullcontext() if one.last else parallel.no_sync():
            (parallel(torch.randn(5, 9, generator=made)).square().mean() * one.weight).backward()
    return model.weight.grad.clone()


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_the_gradient_does_not_depend_on_the_number_of_ranks(size: int) -> None:
    (want,) = run_ranks(1, gradient)
    for found in run_ranks(size, gradient):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
