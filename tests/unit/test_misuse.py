"""Mistakes in the use of DataParallel: each raises an error before data is sent."""

import pytest
from on_ranks import on_ranks
from small_models import batch, momentum_sgd, perceptron, step_on
from torch import nn

import pycomm
from pycomm.errors import InvalidArgument


@on_ranks(2)
def test_second_live_wrapper_raises(group: pycomm.Group) -> None:
    module = perceptron()
    first = pycomm.DataParallel(module, group=group)
    for again in (module, nn.Sequential(module[0], nn.Linear(33, 2)), first):
        with pytest.raises(InvalidArgument, match=r"another live DataParallel.*delete it"):
            pycomm.DataParallel(again, group=group)
    step_on(first, batch(group.rank, 0), momentum_sgd(first))  # the first still works


@on_ranks(2)
def test_a_module_is_wrapped_again_after_its_wrapper_was_deleted(group: pycomm.Group) -> None:
    module = perceptron()
    first = pycomm.DataParallel(module, group=group)
    first.itself = [first]  # type: ignore[assignment]  # a reference cycle
    del first
    second = pycomm.DataParallel(module, group=group)
    step_on(second, batch(group.rank, 0), momentum_sgd(second))


@on_ranks(2)
def test_a_wrapper_on_a_closed_group_does_not_count(group: pycomm.Group) -> None:
    module = perceptron()
    part = group.split(0)
    assert part is not None
    first = pycomm.DataParallel(module, group=part)
    part.close()
    pycomm.DataParallel(module, group=group)
    assert first.module is module  # the first is still alive
