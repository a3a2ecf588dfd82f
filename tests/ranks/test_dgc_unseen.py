"""A step() on gradients that DGC did not exchange raises; every legitimate step() does not.

Ranks are threads. The results of DGC: test_dgc.py and related files.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from small_models import batch, equal, parameters, perceptron, step_on
from torch import Tensor, nn
from torch.nn import functional as F

import pycomm
from pycomm.errors import InvalidArgument
from pycomm.testing import run_ranks

UNSEEN = "DGC did not exchange"


def made(**options: Any) -> tuple[nn.Module, torch.optim.SGD, pycomm.DGC]:
    module = perceptron()
    fast = options.pop("sgd_fused", False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, fused=fast)
    return module, optimizer, pycomm.DGC(
        optimizer, **{"sparsity": [0.9], "min_count": 1, **options}
    )  # fmt: skip


def backward(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    x, y = batch(rank, step)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss


def refused(module: nn.Module, optimizer: Any) -> None:
    """step() raises, states the remedy and changes nothing."""
    before = parameters(module)
    with pytest.raises(InvalidArgument, match=UNSEEN) as caught:
        optimizer.step()
    assert "pycomm.DataParallel(model, compression=dgc)" in str(caught.value)
    assert "register_comm_hook(dgc, pycomm.dgc_hook)" in str(caught.value)
    assert equal(before, parameters(module))


def no_wrapper(group: pycomm.Group) -> None:
    module, optimizer, _ = made()
    backward(module, group.rank)
    refused(module, optimizer)
    optimizer.zero_grad()
    optimizer.step()  # nothing to apply


def wrapper_without_compression(group: pycomm.Group) -> None:
    module, optimizer, _ = made()
    backward(pycomm.DataParallel(module), group.rank)
    refused(module, optimizer)


def local_sgd(group: pycomm.Group) -> None:
    module, optimizer, _ = made()
    local = pycomm.LocalSGD(module, optimizer, k_steps=4)
    backward(module, group.rank)
    refused(module, local)


def only_under_no_sync(group: pycomm.Group) -> None:
    module, optimizer, dgc = made()
    model = pycomm.DataParallel(module, compression=dgc)
    step_on(model, batch(group.rank, 0), optimizer)
    optimizer.zero_grad()
    with model.no_sync():
        backward(model, group.rank, 1)
    refused(module, optimizer)


def the_module_inside(group: pycomm.Group) -> None:
    """The wrapper was deleted, and with it its hooks."""
    module, optimizer, dgc = made()
    model = pycomm.DataParallel(module, compression=dgc)
    step_on(model, batch(group.rank, 0), optimizer)
    optimizer.zero_grad()
    del model
    backward(module, group.rank, 1)
    refused(module, optimizer)


def in_a_closure(group: pycomm.Group) -> None:
    module, optimizer, _ = made()
    before = parameters(module)
    with pytest.raises(InvalidArgument, match=UNSEEN):
        optimizer.step(lambda: backward(module, group.rank))
    assert equal(before, parameters(module))


def added_to_the_last_ones(group: pycomm.Group) -> None:
    """Gradients of the last step() may be applied again, but not with others added to them."""
    module, optimizer, dgc = made()
    model = pycomm.DataParallel(module, compression=dgc)
    step_on(model, batch(group.rank, 0), optimizer)
    with model.no_sync():
        backward(model, group.rank, 1)
    refused(module, optimizer)


MISUSES = [
    no_wrapper, wrapper_without_compression, local_sgd, only_under_no_sync, the_module_inside,
    in_a_closure, added_to_the_last_ones,
]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("misuse", MISUSES, ids=lambda f: f.__name__)
def test_a_step_on_gradients_that_dgc_did_not_exchange_raises(
    misuse: Callable[[pycomm.Group], None], ranks: int
) -> None:
    run_ranks(ranks, misuse)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"rampup_begin_step": 3},
    {"min_count": 1 << 20},
    {"fused": True},
    {"momentum_correction": False},
    {"exchange": "dense_masked"},
]


@on_ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_exchanged_gradients_can_be_stepped(
    group: pycomm.Group, options: dict[str, Any], ranks: int
) -> None:
    """Dense and compressed steps, accumulation, steps without gradients, states and detach()."""
    module, optimizer, dgc = made(**options)
    model = pycomm.DataParallel(module, compression=dgc)
    for step in range(4):
        step_on(model, batch(group.rank, step), optimizer)
    optimizer.zero_grad()
    with model.no_sync():
        backward(model, group.rank, 4)
    backward(model, group.rank, 5)
    optimizer.step()
    optimizer.step()  # the same gradients once more
    for to_none in (True, False):
        optimizer.zero_grad(set_to_none=to_none)
        optimizer.step()
    state = dgc.state_dict()
    backward(model, group.rank, 6)
    dgc.load_state_dict(state)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    step_on(model, batch(group.rank, 7), optimizer)
    dgc.detach()
    before = parameters(module)
    del model
    step_on(module, batch(group.rank, 8), optimizer)
    assert not equal(before, parameters(module))


@on_ranks(2)
@pytest.mark.parametrize("sgd_fused", [False, True])
def test_a_step_that_a_loss_scale_skips_raises_nothing(
    group: pycomm.Group, sgd_fused: bool
) -> None:
    """torch.optim.SGD(fused=True) calls step() even with Inf in its gradients."""
    scaler = pycomm.StaticLossScaler(256.0)
    module, optimizer, dgc = made(scaler=scaler, sgd_fused=sgd_fused)
    model = pycomm.DataParallel(module, compression=dgc)
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(group.rank, step)
        loss = F.mse_loss(model(x), y) * (float("inf") if step == 1 else 1.0)
        before = parameters(module)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert equal(before, parameters(module)) == (step == 1)
    assert dgc.stats()["step"] == 2


@on_ranks(2)
def test_parameters_without_gradients_and_outside_the_model(group: pycomm.Group) -> None:
    module = perceptron()
    own, frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD(
        [
            {"params": [*module.parameters(), frozen.requires_grad_(False)]},
            {"params": [own], "momentum": 0.0},
        ],
        lr=0.1,
        momentum=0.0,
    )
    dgc = pycomm.DGC(optimizer, sparsity=[0.9], min_count=1)
    model = pycomm.DataParallel(module, compression=dgc)
    own.grad = torch.ones(3)
    optimizer.step()  # of a parameter that is not in the model
    assert torch.equal(own.detach(), torch.full((3,), 0.9))
    step_on(model, batch(group.rank, 0), optimizer)


def test_a_closure_keeps_the_momentum() -> None:
    """backward() inside step(closure) gives the same bits as before step()."""

    def program(group: pycomm.Group, inside: bool) -> list[Tensor]:
        module, optimizer, dgc = made()
        model = pycomm.DataParallel(module, compression=dgc)
        for step in range(5):

            def evaluate(step: int = step) -> Tensor:
                optimizer.zero_grad()
                return backward(model, group.rank, step)

            if inside:
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
        return parameters(module)

    (inside, _), (before, _) = (run_ranks(2, program, way) for way in (True, False))
    assert equal(inside, before)
