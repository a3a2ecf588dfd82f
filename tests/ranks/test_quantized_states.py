"""Quantized gradients: states and lost ranks. Ranks are threads."""

from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from quantized_training import adam, train, wide
from small_models import batch, equal, parameters, step_on
from torch import Tensor

import pycomm
from pycomm.errors import Error, InvalidArgument
from pycomm.testing import FaultPlan, run_ranks


def state_of_four(group: pycomm.Group) -> Any:
    """The state of the compression of all ranks after some steps, on rank 1."""
    model = train(group, wide(), range(3), compression=pycomm.Quantize(2, 3), bucket_layers=1)
    return model.compression.gather_state(dst=1)


def test_a_loaded_state_can_be_saved_and_shrunk_before_a_step() -> None:
    """At another number of ranks a state has no owner residuals."""
    state = run_ranks(4, state_of_four)[1]

    def program(group: pycomm.Group) -> None:
        module = wide()
        model = pycomm.DataParallel(module, compression=pycomm.Quantize(2, 3))
        model.compression.load_state_dict(state)
        before = model.compression.state_dict()
        model.compression.load_state_dict(before)
        model.shrink()
        after = model.compression.state_dict()
        assert equal([*after["residual"].values()], [*before["residual"].values()])

    run_ranks(2, program)


@on_ranks(2)
def test_wrong_states_change_nothing(group: pycomm.Group) -> None:
    quantized = train(group, wide()).compression
    state = quantized.state_dict()
    name = next(iter(state["residual"]))
    for wrong in (
        {**state, "version": 5},
        {**state, "rank": 1 - group.rank},
        {**state, "residual": {"other": torch.zeros(3)}},
        {**state, "residual": {**state["residual"], name: torch.zeros(7)}},
    ):
        with pytest.raises(InvalidArgument):
            quantized.load_state_dict(wrong)
    assert equal([*quantized.state_dict()["residual"].values()], [*state["residual"].values()])
    with pytest.raises(Error, match="gather_state"):
        pycomm.save(state, "never written")


def test_survivors_keep_their_residuals() -> None:
    """A rank is lost in a step: the others shrink, and the residuals of their owners with them."""

    def program(group: pycomm.Group) -> list[Tensor] | None:
        module = wide()
        model = pycomm.DataParallel(module, compression=pycomm.Quantize(2, 2))
        optimizer = adam(model)
        step, before = 0, {}
        try:
            for step in range(20):
                before = model.compression.state_dict()
                step_on(model, batch(group.rank, step), optimizer)
        except Error:  # another rank was lost
            if group.rank == 2:
                return None
        rank, size = group.rank, group.size
        sums = {
            k: sum(float(x.double().sum()) for x in before[k].values())
            for k in ("residual", "owner_residual")
        }
        result = model.shrink(optimizer)
        assert result.group.size == 2
        assert result.lost_residual_norm > 0
        after = model.compression.state_dict()
        assert (after["rank"], after["size"]) == (rank, 2)
        assert size == 3
        if after["step"] == before["step"]:
            total = sum(float(x.double().sum()) for x in after["residual"].values())
            assert total == pytest.approx(sum(sums.values()), abs=1e-4)
        step_on(model, batch(rank, 30), optimizer)
        return parameters(module)

    fault = FaultPlan(rank=2, action="disconnect", at="all_to_all", after_bytes=20_000)
    results = run_ranks(3, program, faults=[fault], timeout_s=20)
    assert results[2] is None
    assert equal(results[0], results[1])
