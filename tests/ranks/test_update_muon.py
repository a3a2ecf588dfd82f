"""LocalSGD with Muon for matrices: the formulas, equal replicas, faults and states."""

import copy
import math
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from small_models import batch, equal, parameters, perceptron, step_on
from torch import nn
from torch.nn import functional as F
from update_training import (
    BOTH,
    EXACT,
    SMALL,
    Compression,
    check_failed,
    fail_in_step,
    residuals,
)

import pycomm
from pycomm.errors import Error, InvalidArgument, Mismatch, Unsupported
from pycomm.testing import run_ranks


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def muon_of(model: nn.Module, **options: Any) -> torch.optim.Muon:
    return torch.optim.Muon(matrices(model), **{"lr": 0.02, "weight_decay": 0.1, **options})


def rest_of(model: nn.Module) -> torch.optim.AdamW:
    rest = [p for p in model.parameters() if p.dim() != 2]
    return torch.optim.AdamW(rest, lr=0.01, betas=(0.0, 0.99), weight_decay=0.1)


def local_of(model: nn.Module, compression: Compression, **options: Any) -> pycomm.LocalSGD:
    given = {"muon": muon_of(model), **options}
    return pycomm.LocalSGD(model, rest_of(model), compression=compression, **given)


@on_ranks(2)
def test_the_formulas(group: pycomm.Group) -> None:
    """All values of full precision: Muon on the mean of scaled gradients, AdamW's mean update. The
    gradients of rank 1 are ten times as large."""
    model, twin = perceptron(), perceptron()
    local = local_of(model, EXACT)
    muon, rest = muon_of(twin), rest_of(twin)
    squares = [0.0] * 3
    for step in range(1, 5):
        x, y = batch(group.rank, step)
        for one, optimizer in ((model, local), (twin, None)):
            one.zero_grad()
            (F.mse_loss(one(x), y) * (1 + 9 * group.rank)).backward()
            if optimizer:
                optimizer.step()
        for i, p in enumerate(matrices(twin)):
            squares[i] = 0.99 * squares[i] + 0.01 * float(p.grad.square().mean())
            rms = math.sqrt(squares[i] / (1 - 0.99**step))
            p.grad = pycomm.all_reduce(0.02 * p.grad / rms, "avg")
        muon.step()
        rest.step()
        for p in twin.parameters():
            if p.dim() != 2:
                p.data.copy_(pycomm.all_reduce(p.detach().clone(), "avg"))
    rows = zip(parameters(perceptron()), parameters(model), parameters(twin), strict=True)
    for old, found, wanted in rows:  # Muon computes in bfloat16
        assert float((found - wanted).norm()) < 0.05 * float((wanted - old).norm())


@BOTH
def test_a_failed_exchange_sends_nothing(compression: Compression) -> None:
    """Parameters and Muon's momentum stay; the scaled gradient is in the residual."""

    def program(group: pycomm.Group) -> None:
        model = perceptron()
        local = local_of(model, compression)
        step_on(model, batch(group.rank, 0), local)
        rest, muon = residuals(local), copy.deepcopy(local.state_dict()["muon"])
        fail_in_step(group, model, local, 1)
        state = local.state_dict()
        for mine, saved in zip(
            state["muon"]["state"].values(), muon["state"].values(), strict=True
        ):
            assert torch.equal(mine["momentum_buffer"], saved["momentum_buffer"])
        scaled = list(model.parameters())
        places = [i for i, p in enumerate(scaled) if p.dim() == 2]
        for row, place in zip(state["mean_squares"], places, strict=True):
            update = 0.02 * scaled[place].grad / float(row[0] / row[1]) ** 0.5
            torch.testing.assert_close(
                residuals(local)[place], rest[place] + update.flatten(), rtol=1e-4, atol=1e-6
            )

    check_failed(program)


def test_another_number_of_ranks_takes_the_mean_square() -> None:
    def trained(group: pycomm.Group) -> Any:
        model = perceptron()
        local = local_of(model, SMALL)
        for step in range(3):
            step_on(model, batch(group.rank, step), local)
        return local.gather_state(), local.state_dict()["mean_squares"]

    results = run_ranks(4, trained)
    whole = results[0][0]
    mean = torch.stack([row for _, row in results]).mean(0)
    assert not torch.equal(results[0][1], results[1][1])

    def loaded(group: pycomm.Group) -> None:
        model = perceptron()
        local = local_of(model, SMALL)
        local.load_state_dict(copy.deepcopy(whole))
        torch.testing.assert_close(local.state_dict()["mean_squares"], mean)
        with pytest.raises(InvalidArgument, match="got 2 matrices of Muon, expected 3"):
            local.load_state_dict(
                {**local.state_dict(), "mean_squares": torch.zeros(2, 2, dtype=torch.float64)}
            )

    run_ranks(2, loaded)


@on_ranks(2)
def test_bad_arguments(group: pycomm.Group) -> None:
    model = perceptron()
    rest = rest_of(model)
    for wrong in ({"compression": None}, {"k_steps": 2}, {"outer": rest_of(model)}):
        with pytest.raises(InvalidArgument, match="muon needs compression, k_steps=1"):
            local_of(model, **{"compression": SMALL, **wrong})
    every = torch.optim.AdamW(model.parameters(), betas=(0.0, 0.99))
    with pytest.raises(InvalidArgument, match="in both optimizers"):
        pycomm.LocalSGD(model, every, compression=SMALL, muon=muon_of(model))
    with pytest.raises(InvalidArgument, match="no parameter of the model"):
        pycomm.LocalSGD(model, rest, compression=SMALL, muon=muon_of(perceptron()))
    with pytest.raises(Unsupported, match="expected float32"):
        local_of(perceptron().bfloat16(), SMALL)
    uneven = local_of(model, SMALL, muon=muon_of(model, lr=0.01 * (1 + group.rank)))
    with pytest.raises(Mismatch, match="learning rate"):
        step_on(model, batch(group.rank, 0), uneven)


@BOTH
def test_survivors_continue(compression: Compression) -> None:
    """A rank leaves before a step: the others shrink and train on, with Muon's momentum equal."""

    def program(group: pycomm.Group) -> Any:
        model = perceptron()
        local = local_of(model, compression)
        result, me = None, group.rank
        while local.step_count < 6:
            if me == 2 and local.step_count == 3:
                group.close()
                return None
            try:
                step_on(model, batch(me, local.step_count), local)
            except Error:  # a rank was lost
                result = local.shrink()
        assert result is not None
        assert result.lost == [2]
        assert result.lost_residual_norm > 0
        momenta = [one["momentum_buffer"] for one in local.state_dict()["muon"]["state"].values()]
        return [*parameters(model), *momenta], local.last_sync

    first, second, _ = run_ranks(3, program)
    assert equal(first[0], second[0])
    assert first[1] == second[1] == 6
