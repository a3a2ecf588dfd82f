"""States of LocalSGD with compression: resumed bit for bit, by other ranks, and refused."""

import copy
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from small_models import batch, equal, perceptron, step_on
from update_training import BOTH, SHARDED, SMALL, adamw, residuals

import pycomm
from pycomm.errors import Error, InvalidArgument
from pycomm.testing import run_ranks


def states_after(group: pycomm.Group, compression: Any, steps: int, state: Any = None) -> Any:
    """The states of model, optimizer and LocalSGD, and the gathered state."""
    model = perceptron(3)
    optimizer = adamw(model)
    local = pycomm.LocalSGD(model, optimizer, compression=compression)
    if state is not None:
        for one, saved in zip((model, optimizer, local), copy.deepcopy(state), strict=True):
            one.load_state_dict(saved)
    for step in range(steps):
        step_on(model, batch(group.rank, step), local)
    saved = [copy.deepcopy(one.state_dict()) for one in (model, optimizer, local)]
    return saved, local.gather_state(1 if group.size > 1 else 0)


@BOTH
def test_another_number_of_ranks_takes_the_mean_second_moments(compression: Any) -> None:
    results = run_ranks(3, states_after, compression, 4)
    model, optimizer, _ = results[0][0]
    every = results[1][1]
    moments = [[one["exp_avg_sq"] for one in state[1]["state"].values()] for state, _ in results]
    mean = [torch.stack(rows).mean(0) for rows in zip(*moments, strict=True)]
    assert not equal(moments[0], moments[1])

    def two(group: pycomm.Group) -> None:
        (_, found, _), _ = states_after(group, compression, 0, [model, optimizer, every])
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


@on_ranks(2)
def test_states_with_bases_are_not_averaged(group: pycomm.Group) -> None:
    """A vector has a moment, which is averaged. Rank 1 has no state of the last bias."""
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


@on_ranks(2)
@BOTH
def test_a_state_of_one_rank_is_not_saved_for_all(
    group: pycomm.Group, tmp_path: Any, compression: Any
) -> None:
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


@on_ranks(2)
@BOTH
def test_wrong_states_change_nothing(group: pycomm.Group, compression: Any) -> None:
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
