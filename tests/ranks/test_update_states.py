"""States of LocalSGD with compression: resumed bit for bit, by other ranks, and refused."""

import copy
from typing import Any

import pytest
import torch
from small_models import batch, equal, parameters, perceptron, step_on
from torch import Tensor
from update_training import FEW_BITS, SHARDED, SMALL, adamw, residuals, residuals_of

import pycomm
from pycomm import TopK
from pycomm._training.coalesced import bcast_value
from pycomm.errors import Error, InvalidArgument
from pycomm.testing import run_ranks

BOTH = pytest.mark.parametrize(
    "compression", [SMALL, SHARDED, FEW_BITS], ids=["topk", "topk, sharded", "quantize"]
)


def states_after(
    group: pycomm.Group, compression: Any, steps: range, state: Any = None, k_steps: int = 1
) -> tuple[Any, ...]:
    """(parameters, the state of model, optimizer and LocalSGD, the gathered state)."""
    model = perceptron(3)
    optimizer = adamw(model)
    local = pycomm.LocalSGD(model, optimizer, k_steps, compression=compression)
    if state is not None:
        for one, saved in zip((model, optimizer, local), copy.deepcopy(state), strict=True):
            one.load_state_dict(saved)
    for step in steps:
        step_on(model, batch(group.rank, step), local)
    saved = [copy.deepcopy(one.state_dict()) for one in (model, optimizer, local)]
    return parameters(model), saved, local.gather_state(1 if group.size > 1 else 0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("k_steps", [1, 3])
@pytest.mark.parametrize("gathered", [False, True])
@BOTH
def test_resume_is_bitwise(ranks: int, k_steps: int, gathered: bool, compression: Any) -> None:
    def program(group: pycomm.Group) -> None:
        whole, _, _ = states_after(group, compression, range(10), k_steps=k_steps)
        _, state, every = states_after(group, compression, range(5), k_steps=k_steps)
        assert (every is not None) == (group.rank == 1)
        if gathered:
            state[2] = bcast_value(every, 1, group)
        resumed, _, _ = states_after(group, compression, range(5, 10), state, k_steps)
        assert equal(whole, resumed)

    run_ranks(ranks, program)


@BOTH
def test_another_number_of_ranks_conserves_the_mean_residual(compression: Any) -> None:
    def four(group: pycomm.Group) -> Any:
        _, state, every = states_after(group, compression, range(5))
        return state, every

    results = run_ranks(4, four)
    (model, optimizer, own), every = results[0][0], results[1][1]
    columns = zip(
        *(residuals_of(one, isinstance(compression, TopK)) for one in every["ranks"]), strict=True
    )
    mean = [torch.stack(rows).double().mean(0) for rows in columns]
    assert sum(float(x.abs().sum()) for x in mean) > 0
    for rank in run_ranks(2, loaded, compression, model, optimizer, every, own):
        for x, wanted in zip(rank, mean, strict=True):
            torch.testing.assert_close(x, wanted, atol=1e-7, rtol=0)


def loaded(
    group: pycomm.Group, compression: Any, model: Any, optimizer: Any, every: Any, own: Any
) -> list[Tensor]:
    """The mean residual after the state of four ranks was loaded by this group."""
    _, (_, _, state), _ = states_after(group, compression, range(0), [model, optimizer, every])
    assert state["step_count"] == 5
    assert (state["rank"], state["size"]) == (group.rank, 2)
    with pytest.raises(
        InvalidArgument, match=f"LocalSGD: state of rank 0 of 4 on rank {group.rank}"
    ):
        states_after(group, compression, range(0), [model, optimizer, own])
    return [
        pycomm.all_reduce(e.double(), "avg")
        for e in residuals_of(state, isinstance(compression, TopK))
    ]


@BOTH
def test_another_number_of_ranks_takes_the_mean_second_moments(compression: Any) -> None:
    def three(group: pycomm.Group) -> Any:
        return states_after(group, compression, range(4))[1:]

    results = run_ranks(3, three)
    model, optimizer, _ = results[0][0]
    every = results[1][1]
    moments = [[one["exp_avg_sq"] for one in state[1]["state"].values()] for state, _ in results]
    mean = [torch.stack(rows).mean(0) for rows in zip(*moments, strict=True)]
    assert not equal(moments[0], moments[1])

    def two(group: pycomm.Group) -> None:
        _, (_, found, _), _ = states_after(group, compression, range(0), [model, optimizer, every])
        for one, wanted in zip(found["state"].values(), mean, strict=True):
            torch.testing.assert_close(one["exp_avg_sq"], wanted)
            assert one["step"] == 4

    run_ranks(2, two)


class Bases(torch.optim.SGD):
    """SGD with a state that is no moment, as SOAP's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                moment = p.grad.clone()
                bases = torch.full((2, 5), float(p.grad.sum())) if p.dim() == 2 else None
                self.state[p] = {"moment": moment, "bases": bases, "step": torch.tensor(1.0)}


def test_states_with_bases_are_not_averaged() -> None:
    """A vector has a moment, which is averaged. Rank 1 has no state of the last bias."""

    def program(group: pycomm.Group) -> None:
        model = perceptron()
        optimizer = Bases(model.parameters(), lr=0.1)
        local = pycomm.LocalSGD(model, optimizer, compression=SMALL)
        step_on(model, batch(group.rank, 0), local)
        own = [copy.deepcopy(optimizer.state[p]) for p in model.parameters()]
        if group.rank == 1:
            del optimizer.state[model[4].bias]  # type: ignore[index]  # a Sequential
        wanted = [pycomm.all_reduce(one["moment"].clone(), "mean") for one in own]
        state = local.gather_state()
        if state is None:
            return
        found = state["optimizer"]["state"]
        for place, p in enumerate(model.parameters()):
            averaged = p.dim() == 1 and place != 5
            torch.testing.assert_close(
                found[place]["moment"], wanted[place] if averaged else own[place]["moment"]
            )
            if not averaged:
                assert equal([found[place]["moment"]], [own[place]["moment"]])

    run_ranks(2, program)


@BOTH
def test_a_state_of_one_rank_is_not_saved_for_all(tmp_path: Any, compression: Any) -> None:
    def program(group: pycomm.Group) -> None:
        model = perceptron()
        local = pycomm.LocalSGD(model, adamw(model), compression=compression)
        step_on(model, batch(group.rank, 0), local)
        before = residuals(local)
        with pytest.raises(Error, match="the state of a compression differs by rank"):
            pycomm.save({"local": local.state_dict()}, tmp_path / "state")
        pycomm.save({"local": local.gather_state()}, tmp_path / "state")
        step_on(model, batch(group.rank, 1), local)
        assert not equal(before, residuals(local))
        local.load_state_dict(pycomm.load(tmp_path / "state")["local"])
        assert equal(before, residuals(local))

    run_ranks(2, program)


@BOTH
def test_wrong_states_change_nothing(compression: Any) -> None:
    def program(group: pycomm.Group) -> None:
        model = perceptron()
        local = pycomm.LocalSGD(model, adamw(model), compression=compression)
        step_on(model, batch(group.rank, 0), local)
        state = local.state_dict()
        before = residuals(local)
        owned = state["owner_residual"] if compression is SHARDED else []
        others = [{"owner_residual": [x[1:]]} for x in owned]
        others += [{"owner_residual": [x, x]} for x in owned]
        for wrong, message in (
            ({"version": 7}, "version"),
            ({"size": 3}, "of 3 on rank"),
            ({"residual": state["residual"][1:]}, "residuals of"),
            ({"residual": state["residual"][:-1]}, "residuals of"),
            ({"snapshot": state["snapshot"][1:]}, "shapes"),
            *((wrong, "owner_residual of") for wrong in others),
        ):
            with pytest.raises(InvalidArgument, match=message):
                local.load_state_dict({**state, **wrong})
        assert equal(before, residuals(local))
        with pytest.raises(InvalidArgument, match="with compression"):
            pycomm.LocalSGD(model, adamw(model)).gather_state()

    run_ranks(2, program)
