"""pycomm.functional.all_reduce and all_gather: gradients of the sum of all ranks' losses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from small_models import equal, parameters, perceptron, replicas
from torch import Tensor
from torch.nn import functional as F

import pycomm
from pycomm import default_group
from pycomm.errors import InvalidArgument, Mismatch
from pycomm.functional import all_gather, all_reduce
from pycomm.testing import run_ranks

RANKS = 3


def inputs() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, generator=made, dtype=torch.float64) for _ in range(RANKS)]


def weights(rank: int, rows: int) -> Tensor:
    """Of this rank's loss: those of the ranks differ."""
    made = torch.Generator().manual_seed(100 + rank)
    return torch.randn(rows, 4, 2, generator=made, dtype=torch.float64)


Through = Callable[[Any, pycomm.Group], Tensor]
# What a rank computes with its input, and what one process computes with all of them.
WAYS: dict[str, tuple[Through, Callable[[list[Tensor]], Tensor]]] = {
    "sum": (lambda x, g: all_reduce(x.t(), group=g)[None], lambda xs: sum(xs).t()[None]),
    "mean": (
        lambda x, g: all_reduce(x.t(), "mean", group=g)[None],
        lambda xs: sum(xs).t()[None] / RANKS,
    ),
    "gather": (
        lambda x, g: all_gather(x.t(), group=g),
        lambda xs: torch.stack([x.t() for x in xs]),
    ),
}


def loss_of(y: Tensor, rank: int) -> Tensor:
    return (y**3 * weights(rank, len(y))).sum()


@pytest.mark.parametrize("way", WAYS)
def test_gradients_equal_those_of_one_process(way: str) -> None:
    """Of the sum of the ranks' losses; the second ones too. In a group of the reverse order."""
    ours, theirs = WAYS[way]

    def program(default: pycomm.Group) -> list[Tensor]:
        group = default.split(0, RANKS - default.rank)
        x = inputs()[group.rank].requires_grad_()
        before = x.detach().clone()
        y = ours(x, group)
        assert torch.equal(x, before)
        (first,) = torch.autograd.grad(loss_of(y, group.rank), x, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), x)
        return [y.detach(), first.detach(), second]

    xs = [x.requires_grad_() for x in inputs()]
    y = theirs(xs)
    first = torch.autograd.grad(sum(loss_of(y, r) for r in range(RANKS)), xs, create_graph=True)
    second = torch.autograd.grad(sum((x**2).sum() for x in first), xs)
    for rank, found in enumerate(run_ranks(RANKS, program)[::-1]):
        for one, other in zip(found, (y, first[rank], second[rank]), strict=True):
            torch.testing.assert_close(one, other.detach())


def contrastive(own: Tensor, all_others: Tensor, first: int) -> Tensor:
    """InfoNCE: row i of `own` belongs to row first + i of `all_others`, the rest are negatives."""
    scores = F.normalize(own, dim=1) @ F.normalize(all_others, dim=1).t() / 0.1
    return F.cross_entropy(scores, torch.arange(first, first + len(own)))


def views(rank: int, step: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(4, 16, generator=made) for _ in range(2)]


def test_contrastive_loss_over_all_ranks_equals_one_process() -> None:
    """Also its training under DataParallel, whose mean is over the ranks' losses."""

    def program(group: pycomm.Group, models: list[Any]) -> list[Tensor]:
        model = pycomm.DataParallel(models[group.rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            one, other = model(torch.stack(views(group.rank, step)))
            everywhere = all_gather(other).flatten(0, 1)
            contrastive(one, everywhere, group.rank * len(one)).backward()
            optimizer.step()
        return parameters(model)

    results = run_ranks(RANKS, program, replicas(RANKS))
    assert all(equal(result, results[0]) for result in results)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        pairs = zip(*(views(rank, step) for rank in range(RANKS)), strict=True)
        contrastive(*(model(torch.cat(x)) for x in pairs), 0).backward()
        optimizer.step()
    torch.testing.assert_close(results[0], parameters(model))


@on_ranks(4)
def test_groups_and_dtypes(group: pycomm.Group) -> None:
    """The backward pass uses the group of the forward pass."""
    half = group.split(group.rank % 2)
    assert half is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((2,), group.rank + 1.0, dtype=dtype).requires_grad_()
        (all_reduce(x, group=half) * x.detach()).sum().backward()
        both = [4.0, 6.0][group.rank % 2]  # of ranks 0 and 2, or 1 and 3
        assert x.grad is not None
        assert (x.grad == both).all()
        assert x.grad.dtype == dtype
    assert all_gather(torch.ones(0, 3), group=half).shape == (2, 0, 3)
    assert not all_gather(torch.ones(3)).requires_grad


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(group: pycomm.Group) -> None:
        calls = group.stats().calls
        for op in ("max", "product", "total"):
            with pytest.raises(InvalidArgument):
                all_reduce(torch.ones(2), op)
        assert group.stats().calls == calls
        for call in (all_reduce, all_gather):
            with pytest.raises(Mismatch):
                call(torch.ones(2 + group.rank))
            call(torch.ones(2))

    run_ranks(2, program)
    monkeypatch.setattr(default_group._state, "ended", "")  # another test may have had a group
    with pytest.raises(InvalidArgument, match="no default group yet"):
        all_gather(torch.ones(2))
