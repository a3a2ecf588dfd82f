"""LocalSGD and its adaptive form: the steps of averaging, the averaged values, and no waits."""

import copy
import math
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from small_models import alone, batch, equal, parameters, perceptron, step_on
from torch import Tensor, nn
from torch.nn import functional as F
from update_training import FEW_BITS, SHARDED, SMALL, adamw

import pycomm
from pycomm.errors import Error, InvalidArgument
from pycomm.optim.adaptive import interval
from pycomm.testing import run_ranks


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(data[0]), data[1])


def run_steps(local: Any, model: nn.Module, rank: int, steps: range) -> list[int]:
    """Trains, and returns the steps after which parameters were averaged."""
    averaged = []
    for step in steps:
        step_on(model, batch(rank, step), local)
        if local.last_sync == local.step_count:
            averaged.append(local.step_count)
    return averaged


@on_ranks(2)
@pytest.mark.parametrize(
    ("rule", "wanted"), [("paddle", [1, 2, 3, 7, 11, 15]), ("torch", [1, 2, 3, 4, 8, 12, 16])]
)
def test_the_steps_that_average(group: pycomm.Group, rule: str, wanted: list[int]) -> None:
    """Rule "torch" averages gradients in steps 1 to 3 and parameters after 4, 8, ..."""
    model = perceptron(group.rank)
    local = pycomm.LocalSGD(model, sgd(model), k_steps=4, begin_step=3, rule=rule)
    assert [step for step in range(1, 4) if local.is_due(step)] == (
        [1, 2, 3] if rule == "paddle" else []
    )
    assert run_steps(local, model, group.rank, range(16)) == wanted


@on_ranks(3)
@pytest.mark.parametrize("rule", ["paddle", "torch"])
def test_every_step_is_synchronous_sgd(group: pycomm.Group, rule: str) -> list[Tensor]:
    model = perceptron(1 + group.rank)
    local = pycomm.LocalSGD(model, sgd(model), rule=rule, begin_step=3)
    run_steps(local, model, group.rank, range(6))
    result = parameters(model)
    torch.testing.assert_close(result, alone(perceptron(), 6, 3, sgd))
    return result


def test_ranks_train_independently_between_averages() -> None:
    def program(group: pycomm.Group) -> list[list[Tensor]]:
        model = perceptron()
        local = pycomm.LocalSGD(model, sgd(model), k_steps=3)
        seen = []
        calls = 0
        for step in range(8):
            before = group.stats().calls
            step_on(model, batch(group.rank, step), local)
            calls += group.stats().calls - before
            seen.append(parameters(model))
        assert calls == 3  # all parameters in one call, after steps 1, 4 and 7
        return seen

    for step, (a, b) in enumerate(zip(*run_ranks(2, program), strict=True), 1):
        assert equal(a, b) == (step in (1, 4, 7)), step


def test_the_average_is_that_of_independent_runs() -> None:
    """One round of three steps, computed for each rank separately."""

    def program(group: pycomm.Group) -> list[Tensor]:
        model = perceptron()
        local = pycomm.LocalSGD(model, sgd(model), k_steps=3)
        run_steps(local, model, group.rank, range(4))
        return parameters(model)

    models = [perceptron() for _ in range(3)]
    optimizers = [sgd(model) for model in models]
    for step in range(4):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step_on(model, batch(rank, step), optimizer)
        if step in (0, 3):
            for group in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.detach() for p in group]).mean(0)
                for p in group:
                    p.data.copy_(mean)
    torch.testing.assert_close(run_ranks(3, program)[0], parameters(models[0]))


@on_ranks(2)
def test_adam_is_synchronous_until_begin_step(group: pycomm.Group) -> list[Tensor]:
    model = perceptron(group.rank + 1)
    local = pycomm.LocalSGD(model, adam(model), k_steps=4, begin_step=5)
    assert run_steps(local, model, group.rank, range(5)) == [1, 2, 3, 4, 5]
    result = parameters(model)
    assert run_steps(local, model, group.rank, range(5, 13)) == [9, 13]
    torch.testing.assert_close(result, alone(perceptron(), 5, 2, adam))
    return result


@on_ranks(3)
@pytest.mark.parametrize("make", [sgd, adam])
def test_the_norm_of_gradients(group: pycomm.Group, make: Any) -> None:
    """That of an average is clip_norm; that of one of three ranks is sqrt(3) times as long."""
    model, norms = perceptron(), []
    optimizer = make(model)
    optimizer.register_step_pre_hook(
        lambda *_: norms.append(float(torch.cat([p.grad.flatten() for p in given]).norm()))
    )
    given = list(model.parameters())
    local = pycomm.LocalSGD(model, optimizer, rule="torch", begin_step=2, clip_norm=1e-3)
    run_steps(local, model, group.rank, range(4))
    assert norms == pytest.approx([1e-3] * 2 + [1e-3 * 3**0.5] * 2, rel=1e-4)


class RoundedUp(torch.optim.Adam):
    """As on a processor, or with a library, whose last bits differ."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.data.copy_(torch.nextafter(p.data, torch.tensor(math.inf)))
        return result


@on_ranks(2)
def test_averages_are_equal_though_ranks_round_differently(group: pycomm.Group) -> list[Tensor]:
    model = perceptron(group.rank)
    optimizer = (RoundedUp if group.rank else torch.optim.Adam)(model.parameters(), lr=0.01)
    local = pycomm.LocalSGD(model, optimizer, k_steps=2, begin_step=3)
    assert run_steps(local, model, group.rank, range(7)) == [1, 2, 3, 5, 7]
    return parameters(model)


@pytest.mark.parametrize("momentum", ["local", "averaged"])
def test_momentum(momentum: str) -> None:
    def program(group: pycomm.Group) -> list[Tensor]:
        model = perceptron()
        optimizer = sgd(model)
        local = pycomm.LocalSGD(model, optimizer, k_steps=2, momentum=momentum)
        run_steps(local, model, group.rank, range(5))
        return [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]

    assert equal(*run_ranks(2, program)) == (momentum == "averaged")


@pytest.mark.parametrize("buffers", [True, False])
def test_buffers(buffers: bool) -> None:
    def program(group: pycomm.Group) -> list[Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(16), perceptron())
        local = pycomm.LocalSGD(model, sgd(model), k_steps=2, buffers=buffers)
        run_steps(local, model, group.rank, range(3))
        return [b.clone() for b in model.buffers()]

    assert equal(*run_ranks(2, program)) == buffers


def test_an_outer_optimizer() -> None:
    """Rate 1 without momentum is the plain average; with momentum it is computed by hand."""

    def program(group: pycomm.Group, rate: float | None, momentum: float) -> list[list[Tensor]]:
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = None
        if rate is not None:
            nesterov = momentum > 0
            outer = torch.optim.SGD(
                model.parameters(), lr=rate, momentum=momentum, nesterov=nesterov
            )
        local = pycomm.LocalSGD(model, inner, k_steps=2, outer=outer)
        seen = []
        for round_ in range(3):
            run_steps(local, model, group.rank, range(2 * round_, 2 * round_ + 1 + (round_ > 0)))
            seen.append(parameters(model))
        return seen

    plain = run_ranks(2, program, None, 0.0)
    same = run_ranks(2, program, 1.0, 0.0)
    for a, b in zip(plain[0], same[0], strict=True):
        torch.testing.assert_close(a, b)
    outer = run_ranks(2, program, 0.7, 0.9)
    assert all(equal(a, b) for a, b in zip(*outer, strict=True))
    assert not equal(outer[0][2], plain[0][2])

    def first_round(group: pycomm.Group) -> list[Tensor]:
        """By hand: one synchronous step, then two local ones, then the outer step."""
        model = perceptron()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        local = pycomm.LocalSGD(model, inner, k_steps=100)
        run_steps(local, model, group.rank, range(1))
        start = parameters(model)
        for step in (2, 3):
            step_on(model, batch(group.rank, step), inner)
        return [
            s - 0.7 * 1.9 * pycomm.all_reduce(s - p, "avg")
            for s, p in zip(start, parameters(model), strict=True)
        ]

    torch.testing.assert_close(run_ranks(2, first_round)[0], outer[0][1])


@pytest.mark.parametrize(
    ("change", "init", "rule", "wanted"),
    [
        (10 * 0.1, 4, "paddle", 2),
        (10 * 0.1, 4, "paper", 4),
        (100 * 0.05, 8, "paddle", 7),
        (100 * 0.05, 8, "paper", 16),
        (1e-9, 4, "paddle", 1),
        (9.0, 1, "paddle", 3),
    ],
)
def test_intervals(change: float, init: int, rule: str, wanted: int) -> None:
    assert interval(change, init, 16, rule) == wanted


def test_adaptive_follows_rate_and_loss() -> None:
    """The ranks' losses differ; the mean of the finite ones counts, and rank 0's rate."""

    def program(group: pycomm.Group, reference: str) -> list[tuple[int, int]]:
        model = perceptron()
        optimizer = sgd(model)
        local = pycomm.AdaptiveLocalSGD(
            model, optimizer, init_k_steps=4, begin_step=2, reference=reference
        )
        seen = []
        for step in range(1, 24):
            optimizer.zero_grad()
            loss_of(model, batch(group.rank, step)).backward()
            rate = (0.5, 0.1, 0.01)[0 if step == 1 else 1 if step < 6 else 2]
            optimizer.param_groups[0]["lr"] = rate if group.rank == 0 else 0.3
            mean = 2.0 if step < 6 else 0.9
            loss = mean + (0.5 if group.rank else -0.5)
            local.step(math.inf if group.rank and step > 11 else loss)
            if local.last_sync == step:
                seen.append((step, local.k_steps))
        return seen

    # change at step 6 is (0.5 / 0.01) * (0.9 / 2) = 22.5: ceil(sqrt(22.5 * 4)) = 10
    # and with rank 0's loss alone, in step 16, (0.5 / 0.01) * (0.4 / 2) = 10: ceil(sqrt(40)) = 7
    assert run_ranks(2, program, "first") == [[(1, 4), (2, 4), (6, 10), (16, 7), (23, 7)]] * 2
    # against step 2 it is (0.1 / 0.01) * (0.9 / 2) = 4.5: ceil(sqrt(18)) = 5, then ceil(sqrt(8))
    wanted = [(1, 4), (2, 4), (6, 5), (11, 5), (16, 3), (19, 3), (22, 3)]
    assert run_ranks(2, program, "begin") == [wanted] * 2


@on_ranks(2)
@pytest.mark.parametrize("wrong", ["loss", "nan", "rate", "first"])
def test_adaptive_without_an_interval_raises_everywhere(group: pycomm.Group, wrong: str) -> None:
    model = perceptron()
    optimizer = sgd(model)
    local = pycomm.AdaptiveLocalSGD(model, optimizer)
    for step in (1, 2):
        step_on(model, batch(group.rank, step), optimizer)
        loss = {"loss": (1.0, 0.0), "nan": (1.0, math.nan), "first": (-1.0, 1.0)}
        if step == 2:
            if wrong == "rate" and group.rank == 0:
                optimizer.param_groups[0]["lr"] = 0.0
            with pytest.raises(InvalidArgument, match="no interval follows from loss"):
                local.step(loss.get(wrong, (1.0, 1.0))[1])
        else:
            local.step(loss.get(wrong, (1.0, 1.0))[0])


def overflowing(model: nn.Module, data: tuple[Tensor, Tensor], overflow: bool) -> Tensor:
    loss = loss_of(model, data)
    return loss * math.inf if overflow else loss


@pytest.mark.parametrize("scaler", ["static", "torch"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_skipped_step_delays_no_rank(scaler: str, adaptive: bool) -> None:
    """Rank 1 overflows from the third step on: it skips all later steps, and averages like the
    others."""

    def program(group: pycomm.Group) -> tuple[list[int], list[Tensor]]:
        model = perceptron()
        scale = (
            pycomm.StaticLossScaler(8.0)
            if scaler == "static"
            else torch.amp.GradScaler("cpu", init_scale=8.0)
        )
        kind = pycomm.AdaptiveLocalSGD if adaptive else pycomm.LocalSGD
        local = kind(model, sgd(model), 2, begin_step=2)
        averaged = []
        for step in range(8):
            local.zero_grad()
            loss = overflowing(model, batch(group.rank, step), group.rank == 1 and step >= 2)
            scale.scale(loss).backward()
            before = parameters(model)
            scale.step(local, loss) if adaptive else scale.step(local)
            scale.update()
            if local.last_sync == local.step_count:
                averaged.append(local.step_count)
            else:
                assert equal(before, parameters(model)) == (group.rank == 1)
        return averaged, parameters(model)

    (first, a), (second, b) = run_ranks(2, program)
    assert first == second
    assert adaptive or first == [1, 2, 4, 6, 8]
    assert equal(a, b) == (first[-1] == 8)
    assert all(bool(x.isfinite().all()) for x in (*a, *b))


FORMS = [(make, {"k_steps": 2, "begin_step": 2}) for make in (sgd, adam)]
FORMS += [(adamw, {"compression": c, "clip_norm": 0.1}) for c in (SMALL, SHARDED, FEW_BITS)]


@pytest.mark.parametrize(("make", "options"), FORMS)
def test_a_loss_scale_changes_nothing_else(make: Any, options: dict[str, Any]) -> None:
    def program(group: pycomm.Group, scaled: bool, unscale: bool) -> list[Tensor]:
        model = perceptron()
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
        local = pycomm.LocalSGD(model, make(model), **options)
        for step in range(6):
            local.zero_grad()
            scaler.scale(loss_of(model, batch(group.rank, step))).backward()
            if unscale:
                scaler.unscale_(local)
            scaler.step(local)
            scaler.update()
        return parameters(model)

    plain = run_ranks(2, program, False, False)[0]
    for unscale in (False, True):
        assert equal(run_ranks(2, program, True, unscale)[0], plain)


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_stragglers_cost_less(ranks: int) -> None:
    """Each rank has a clock of work done; an average sets all to the latest. No real time."""

    def program(group: pycomm.Group, k_steps: int) -> float:
        model = nn.Linear(2, 1)
        local = pycomm.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.0), k_steps)
        slow = torch.Generator().manual_seed(group.rank)
        clock = torch.zeros((), dtype=torch.float64)
        waited = 0.0
        for _ in range(193):
            clock += 1.0 + 4.0 * float(torch.rand((), generator=slow) < 0.1)
            local.step()
            if local.last_sync == local.step_count:
                before = clock.item()
                pycomm.all_reduce(clock, "max")
                waited += clock.item() - before
        return waited

    every, eighth = (sum(run_ranks(ranks, program, k)) for k in (1, 8))
    assert every > 0
    assert eighth < 0.6 * every


def test_failed_average_changes_nothing() -> None:
    def program(group: pycomm.Group) -> None:
        model = perceptron()
        optimizer = sgd(model)
        local = pycomm.LocalSGD(model, optimizer, k_steps=2, momentum="averaged")
        run_steps(local, model, group.rank, range(2))
        twin = copy.deepcopy(model)
        twin_optimizer = sgd(twin)
        twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step_on(twin, batch(group.rank, 2), twin_optimizer)
        group.abort("a rank is lost")
        with pytest.raises(Error):
            step_on(model, batch(group.rank, 2), local)
        assert equal(parameters(model), parameters(twin))
        assert local.last_sync == 1

    results = run_ranks(2, program, return_exceptions=True)
    assert all(isinstance(result, (Error, type(None))) for result in results), results
    assert None in results


def test_resume_between_two_averages() -> None:
    def program(group: pycomm.Group, stop: int | None) -> list[Tensor]:
        model = perceptron()
        kind = pycomm.AdaptiveLocalSGD

        def outer(model: nn.Module) -> torch.optim.SGD:
            return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

        optimizer = sgd(model)
        local = kind(model, optimizer, 4, outer=outer(model))
        for step in range(14):
            if step == stop:
                kept = copy.deepcopy(
                    [model.state_dict(), optimizer.state_dict(), local.state_dict()]
                )
                model = perceptron(5)
                optimizer = sgd(model)
                local = kind(model, optimizer, 4, outer=outer(model))
                for one, state in zip((model, optimizer, local), kept, strict=True):
                    one.load_state_dict(state)
            local.zero_grad()
            loss = loss_of(model, batch(group.rank, step))
            loss.backward()
            local.step(loss)
        return parameters(model)

    whole = run_ranks(2, program, None)
    for stop in (1, 3, 7):
        resumed = run_ranks(2, program, stop)
        assert all(equal(a, b) for a, b in zip(whole, resumed, strict=True))


@on_ranks(1)
def test_bad_arguments(group: pycomm.Group) -> None:
    model = perceptron()
    for wrong in (
        {"k_steps": 0}, {"begin_step": 0}, {"rule": "often"}, {"momentum": "none"},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            pycomm.LocalSGD(model, sgd(model), **wrong)
    with pytest.raises(InvalidArgument, match="SGD"):
        pycomm.LocalSGD(model, adam(model), momentum="averaged")
    with pytest.raises(InvalidArgument, match="pass the module inside it"):
        pycomm.LocalSGD(pycomm.DataParallel(model), sgd(model))
    for wrong in ({"rule": "torch"}, {"reference": "last"}, {"init_k_steps": 17}):
        with pytest.raises(InvalidArgument):
            pycomm.AdaptiveLocalSGD(model, sgd(model), **wrong)
    with pytest.raises(InvalidArgument):
        pycomm.StaticLossScaler(0.0)


def test_static_scale_is_kept() -> None:
    model = perceptron()
    optimizer = sgd(model)
    scaler = pycomm.StaticLossScaler(128.0)
    plain = perceptron()
    plain_optimizer = sgd(plain)
    for step in range(4):
        before = parameters(model)
        optimizer.zero_grad()
        scaler.scale(overflowing(model, batch(0, step), step == 2)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 128.0
        assert equal(before, parameters(model)) == (step == 2)
        if step != 2:
            step_on(plain, batch(0, step), plain_optimizer)
    assert equal(parameters(model), parameters(plain))


def test_static_scale_is_loaded() -> None:
    scaler = pycomm.StaticLossScaler(128.0)
    scaler.load_state_dict(pycomm.StaticLossScaler(64.0).state_dict())
    scaler.scale(torch.ones(1))
    scaler.update()
    assert scaler.get_scale() == 64.0
