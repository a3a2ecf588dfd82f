"""How DataParallel and LocalSGD choose the exchange of Quantize, and change it without loss. Ranks
are threads."""

import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from quantized_training import adam, total_residual, train, wide
from small_models import batch, equal, parameters, step_on
from torch import Tensor, nn
from torch.nn import functional as F
from update_training import adamw, residuals_of

import pycomm
from pycomm._training.communicators import CommunicatorPool
from pycomm.compress import quantized_cost
from pycomm.compress.cost_model import FLAT, Link, Topology
from pycomm.compress.quantized_cost import PhaseCoding, QuantizedLoad, predicted
from pycomm.errors import InvalidArgument
from pycomm.testing import run_ranks

AUTO = pycomm.Quantize(2, 4, exchange="auto_time")
Figures = Callable[[pycomm.Group], str]  # the exchange that is fastest by the figures of a rank


@pytest.fixture
def fastest(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the measured figures, and returns the loads that were measured."""

    def choose(figures: Figures) -> list[QuantizedLoad]:
        loads: list[QuantizedLoad] = []

        def measure(load: QuantizedLoad, group: pycomm.Group) -> dict[str, float]:
            loads.append(load)
            return {name: float(name != figures(group)) for name in ("dense", "sharded")}

        monkeypatch.setattr(quantized_cost, "measure_exchanges", measure)
        return loads

    return choose


def test_a_fast_link_is_dense_and_a_slow_one_is_quantized() -> None:
    """Coding at 1 GB/s and less: 10 Gbit/s and 0.1 Gbit/s between 2 ranks, and between 2 hosts."""
    load, up, down = QuantizedLoad(10**7, 4 * 10**7, 3, 8), PhaseCoding(4e-9, 2e-9), PhaseCoding(
        2e-9, 1e-9
    )  # fmt: skip
    inside = Link(1e-5, 1e-10)
    for size, topology in ((2, FLAT), (8, FLAT), (8, Topology(2, inside))):
        fast = predicted(load, size, Link(1e-4, 8 / 1e10), up, down, topology)
        slow = predicted(load, size, Link(1e-4, 8 / 1e8), up, down, topology)
        best = "sharded" if topology is FLAT else "hierarchical"
        assert min(fast, key=lambda name: fast[name]) == "dense"
        assert min(slow, key=lambda name: slow[name]) == best
    two = predicted(load, 2, Link(1e-4, 1e-8), up, down)
    assert two["dense"] == pytest.approx(4e7 * 1e-8 + 1e-4)
    assert two["sharded"] == pytest.approx(
        0.5 * 10**7 * 11 / 8 * 1e-8 + 2e-4 + 10**7 * (4e-9 + 2e-9 + 2e-9 / 2 + 1e-9), rel=1e-3
    )


def test_measured_figures_are_positive() -> None:
    load = QuantizedLoad(10_000, 40_000, 3, 8)
    for costs in run_ranks(2, lambda group: quantized_cost.measure_exchanges(load, group)):
        assert set(costs) == {"dense", "sharded"}
        assert all(cost > 0 for cost in costs.values())


def gradients(group: pycomm.Group) -> tuple[list[Tensor], dict[str, Any]]:
    model = train(group, wide(), range(3), compression=AUTO)
    return parameters(model), model.compression.stats()


def updates(group: pycomm.Group) -> tuple[list[Tensor], dict[str, Any]]:
    model = wide()
    local = pycomm.LocalSGD(model, adamw(model), compression=AUTO)
    for step in range(3):
        step_on(model, batch(group.rank, step), local)  # type: ignore[arg-type]  # has its methods
    return parameters(model), local.stats()


@pytest.mark.parametrize("program", [gradients, updates])
@pytest.mark.parametrize("chosen", ["dense", "sharded"])
def test_all_ranks_use_the_choice_of_rank_0(
    fastest: Any, caplog: pytest.LogCaptureFixture, program: Any, chosen: str
) -> None:
    """The other ranks' figures are for the other exchange. It is logged once."""
    other = "sharded" if chosen == "dense" else "dense"
    loads = fastest(lambda group: chosen if group.rank == 0 else other)
    with caplog.at_level(logging.INFO, "pycomm"):
        results = run_ranks(3, program)
    assert len(loads) == 3
    assert loads[0].nbytes == 4 * sum(x.numel() for x in results[0][0])
    for found, stats in results:
        assert equal(found, results[0][0])
        assert stats["exchange"] == chosen
        assert stats["exchange_costs"] == {chosen: 0.0, other: 1.0}
    (message,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Quantize:")]
    assert f"exchange {chosen!r}" in message
    assert f"{other} 1 s" in message


def test_dense_gradients_are_those_without_compression(fastest: Any) -> None:
    fastest(lambda group: "dense")

    def program(group: pycomm.Group, compression: Any) -> list[Tensor]:
        return parameters(train(group, wide(), compression=compression))

    assert equal(run_ranks(2, program, AUTO)[0], run_ranks(2, program, None)[0])


def saved_gradients(group: pycomm.Group) -> Any:
    return train(group, wide(), compression=pycomm.Quantize(1, 2)).compression.gather_state()


def load(local: pycomm.LocalSGD, model: nn.Module, state: dict[str, Any]) -> None:
    local.load_state_dict(copy.deepcopy(state))  # the optimizers would share tensors
    for p, shared in zip(model.parameters(), local.state_dict()["snapshot"], strict=True):
        p.data.copy_(shared)


def without_choice(state: dict[str, Any]) -> dict[str, Any]:
    """The state as an older version saved it, so that the exchange is chosen again."""
    for rank in state["ranks"]:
        del rank["exchange"]
    return state


@pytest.mark.parametrize("order", list(itertools.permutations(["dense", "sharded"])))
def test_gradients_are_conserved_where_the_exchange_changes(
    fastest: Any, order: tuple[str, str]
) -> None:
    """Four ranks leave residuals, two continue with one exchange, then with the other. The mean
    gradients that arrived, plus the mean residual, are the mean of all gradients."""
    now = [""]
    fastest(lambda group: now[0])

    def program(group: pycomm.Group, state: Any) -> Any:
        module = wide()
        model = pycomm.DataParallel(module, compression=AUTO)
        model.compression.load_state_dict(state)
        names, ps = zip(*module.named_parameters(), strict=True)
        given = dict.fromkeys(names, 0.0)
        arrived = dict(given)
        for step in range(3):
            x, y = batch(group.rank, step)
            own = torch.autograd.grad(F.mse_loss(module(x), y), ps)
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
            for name, p, g in zip(names, ps, own, strict=True):
                given[name] += float(g.double().sum()) / group.size
                arrived[name] += float(p.grad.double().sum())
        assert model.compression.stats()["exchange"] == now[0]
        return given, arrived, model.compression.gather_state()

    state = run_ranks(4, saved_gradients)[0]
    for now[0] in order:
        results = run_ranks(2, program, state)
        before, state = state, without_choice(results[0][2])
        for name in results[0][0]:
            given = sum(rank[0][name] for rank in results)
            left, kept = (total_residual(one, name) / one["size"] for one in (before, state))
            assert (kept == 0) == (now[0] == "dense")
            assert results[0][1][name] + kept == pytest.approx(given + left, abs=1e-5)


@pytest.mark.parametrize("order", list(itertools.permutations(["dense", "sharded"])))
def test_updates_are_conserved_where_the_exchange_changes(
    fastest: Any, order: tuple[str, str]
) -> None:
    """The same with updates: SGD at rate 1 without momentum, so that updates are gradients."""
    now = [""]
    fastest(lambda group: now[0])

    def program(group: pycomm.Group, state: Any, compression: Any = AUTO) -> Any:
        model = wide()
        rate = torch.optim.SGD(model.parameters(), lr=0.01)
        local = pycomm.LocalSGD(model, rate, compression=compression)
        if state is not None:
            load(local, model, state)
        start = parameters(model)
        total = [torch.zeros_like(x, dtype=torch.float64) for x in start]
        for step in range(3):
            before = parameters(model)
            x, y = batch(group.rank, step)
            local.zero_grad()
            F.mse_loss(model(x), y).backward()
            for one, p in zip(total, model.parameters(), strict=True):
                one.sub_(p.grad, alpha=0.01)
            local.step()
            assert not equal(before, parameters(model))
        if state is not None:
            assert local.stats()["exchange"] == now[0]
        moved = [b.double() - a for a, b in zip(start, parameters(model), strict=True)]
        return moved, total, local.gather_state()

    def mean_residual(state: Any) -> list[Tensor]:
        columns = zip(*(residuals_of(one) for one in state["ranks"]), strict=True)
        return [torch.stack(rows).double().mean(0) for rows in columns]

    state = run_ranks(4, program, None, pycomm.Quantize(1, 2))[0][2]
    for now[0] in order:
        results = run_ranks(2, program, state)
        before, state = mean_residual(state), without_choice(results[0][2])
        after = mean_residual(state)
        assert all(float(x.abs().sum()) == 0 for x in after) == (now[0] == "dense")
        means = [torch.stack(rows).mean(0) for rows in zip(*(r[1] for r in results), strict=True)]
        for moved, mean, old, new in zip(results[0][0], means, before, after, strict=True):
            # The residual is in units of parameters that are subtracted.
            arrived = moved.flatten() - new
            torch.testing.assert_close(arrived, mean.flatten() - old, atol=1e-5, rtol=0)


def test_a_saved_choice_is_kept_and_other_ranks_choose_again(fastest: Any) -> None:
    loads = fastest(lambda group: "dense")

    def program(group: pycomm.Group, state: Any) -> Any:
        model = pycomm.DataParallel(wide(), compression=AUTO)
        if state is not None:
            model.compression.load_state_dict(state)
        step_on(model, batch(group.rank, 0), adam(model))
        return model.compression.gather_state(), model.compression.stats()["exchange"]

    state = run_ranks(2, program, None)[0][0]
    assert len(loads) == 2
    fastest(lambda group: "sharded")
    assert [one[1] for one in run_ranks(2, program, state)] == ["dense"] * 2
    assert [one[1] for one in run_ranks(3, program, state)] == ["sharded"] * 3


@on_ranks(2)
def test_all_reduce_has_one_exchange(group: pycomm.Group) -> None:
    with pytest.raises(InvalidArgument, match="LocalSGD"):
        pycomm.all_reduce(torch.ones(9), compression=AUTO)


class Broken(Exception):
    """The error of a transfer."""


def test_failed_dense_updates_stay_in_the_residual(
    fastest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks fail in a step and repeat the exchange: nothing is lost or sent twice."""
    fastest(lambda group: "dense")
    real, failing = CommunicatorPool.all_reduce, [False] * 2

    def sometimes(*given: Any) -> Any:
        work = real(*given)
        if failing[pycomm.rank()]:
            work.wait()
            raise Broken
        return work

    monkeypatch.setattr(CommunicatorPool, "all_reduce", sometimes)

    def left(group: pycomm.Group) -> Any:
        model = wide()
        local = pycomm.LocalSGD(model, adamw(model), compression=pycomm.Quantize(1, 2))
        step_on(model, batch(group.rank, 0), local)  # type: ignore[arg-type]  # has its methods
        return local.gather_state()

    state = run_ranks(3, left)[0]

    def program(group: pycomm.Group, fail: bool) -> list[Tensor]:
        model = wide()
        local = pycomm.LocalSGD(model, adamw(model), compression=AUTO)
        load(local, model, state)
        for step in range(1, 3):
            if step == 1 and fail:
                before, failing[group.rank] = parameters(model), True
                with pytest.raises(Broken):
                    step_on(model, batch(group.rank, step), local)  # type: ignore[arg-type]  # has its methods
                assert equal(before, parameters(model))
                assert max(float(e.abs().max()) for e in residuals_of(local.state_dict())) > 0
                failing[group.rank] = False
                local.average()
            else:
                step_on(model, batch(group.rank, step), local)  # type: ignore[arg-type]  # has its methods
        assert max(float(e.abs().max()) for e in residuals_of(local.state_dict())) == 0
        return parameters(model)

    for failed, whole in zip(
        run_ranks(2, program, True), run_ranks(2, program, False), strict=True
    ):
        for got, wanted in zip(failed, whole, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)
