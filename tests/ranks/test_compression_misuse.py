"""Programs that would train ranks apart, or lose what was loaded: they raise, or are right.
For every compression; ranks are threads.
"""

import copy
import io
from typing import Any

import pytest
import torch
from contract import COMPRESSED, DGC, GRADIENTS, LOCAL, PLAIN, Trained, trained, unsent
from small_models import alone, batch, equal, momentum_sgd, parameters, perceptron, step_on
from torch import Tensor, nn
from torch.nn import functional as F

import pycomm
from pycomm.errors import InvalidArgument, Mismatch
from pycomm.testing import run_ranks

DENSE = "none"
every = pytest.mark.parametrize("form", [*COMPRESSED, *PLAIN, DENSE])
gradients = pytest.mark.parametrize("form", [*GRADIENTS, DENSE])


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(96))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def data(rank: int, step: int) -> Tensor:
    return torch.randn(96, generator=torch.Generator().manual_seed(100 * step + rank))


@every
def test_two_passes_before_a_step(form: str) -> None:
    """Gradients add up, or, with DGC, the second pass raises and the next step works."""

    def program(group: pycomm.Group) -> Any:
        made = trained(form, Line(), unused=False)
        for step in range(5):
            made.stepper.zero_grad()
            made.model(data(group.rank, 2 * step)).backward()
            if form in DGC:
                with pytest.raises(InvalidArgument, match="had exchanged"):
                    made.model(data(group.rank, 9)).backward()
                made.stepper.zero_grad(set_to_none=step % 2 == 0)
                made.model(data(group.rank, 2 * step)).backward()
            else:
                made.model(data(group.rank, 2 * step + 1)).backward()
            made.stepper.step()
        states = None if made.holder is None or form in PLAIN else made.holder.gather_state(0)
        return made.module.w.detach(), states

    found = run_ranks(2, program)
    assert torch.equal(found[0][0], found[1][0])
    if form in DGC:
        return  # the dropped gradients of a failed pass are in no sum
    rest = torch.zeros(96) if found[0][1] is None else unsent(form, Line, found[0][1])[0]
    total = sum(data(r, s) for r in range(2) for s in range(10)) / 2
    torch.testing.assert_close(rest - found[0][0], total, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", [*DGC, *LOCAL, *PLAIN])
def test_a_parameter_group_added_late_raises(form: str) -> None:
    def program(group: pycomm.Group) -> None:
        module = perceptron()
        optimizer = torch.optim.SGD(module[4].parameters(), lr=0.1, momentum=0.9)
        made = trained(form, module, optimizer, unused=False)
        step_on(made.model, batch(group.rank, 0), made.stepper)
        optimizer.add_param_group({"params": [*module[0].parameters()]})
        with pytest.raises(InvalidArgument, match="add_param_group"):
            step_on(made.model, batch(group.rank, 1), made.stepper)

    run_ranks(2, program)


def unfreeze(made: Trained) -> None:
    made.module[0].requires_grad_(True)


def assign(made: Trained) -> None:
    made.module.load_state_dict(perceptron(3).state_dict(), assign=True)


def replace(made: Trained) -> None:
    made.module[4] = nn.Linear(20, 3)


def grow(made: Trained) -> None:
    made.module.extra = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("change", [unfreeze, assign, replace, grow], ids=lambda f: f.__name__)
@every
def test_a_parameter_that_came_after_the_wrapper_raises(form: str, change: Any) -> None:
    def program(group: pycomm.Group) -> None:
        module = perceptron()
        module[0].requires_grad_(False)
        made = trained(form, module, torch.optim.SGD(module.parameters(), lr=0.1))
        step_on(made.model, batch(group.rank, 0), made.stepper)
        change(made)
        with pytest.raises(InvalidArgument, match=r"'(0|2|4)\.weight'|'extra'|'0\.0'"):
            step_on(made.model, batch(group.rank, 1), made.stepper)

    run_ranks(2, program)


@gradients
def test_a_wrapper_is_neither_copied_nor_saved(form: str) -> None:
    def program(group: pycomm.Group) -> None:
        made = trained(form, perceptron())
        for use in (copy.deepcopy, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises(InvalidArgument, match=r"\.module"):
                use(made.model)
        twin = copy.deepcopy(made.module)
        torch.save(twin, io.BytesIO())
        step_on(made.model, batch(group.rank, 0), made.stepper)

    run_ranks(2, program)


@gradients
def test_an_omitted_backward_pass_raises(form: str) -> None:
    """On both ranks, at once, with the numbers of the passes."""

    def program(group: pycomm.Group) -> None:
        module = perceptron()
        made = trained(form, module, unused=False)
        with pytest.raises(Mismatch) as caught:
            for step in range(3):
                made.stepper.zero_grad()
                x, y = batch(group.rank, step)
                loss = F.mse_loss(made.model(x), y)
                if step == 1 and group.rank == 1:
                    loss = torch.zeros((), requires_grad=True)
                loss.backward()
                assert step == 0 or group.rank == 1
        assert "pass 2 of parameters" in str(caught.value)
        assert "pass 3 of parameters" in str(caught.value)

    run_ranks(2, program, timeout_s=20)


def test_a_hook_on_gradients_that_come_in_another_order_raises() -> None:
    def program(group: pycomm.Group) -> None:
        one, other = (nn.Parameter(torch.ones(8)) for _ in range(2))
        average = pycomm.make_allreduce_cb("mean")
        for p in (one, other):
            p.register_post_accumulate_grad_hook(average)
        (one.sum() + other.sum()).backward()
        with pytest.raises(Mismatch, match="pass 2"):
            (one if group.rank == 0 else other).sum().backward()

    run_ranks(2, program)


@pytest.mark.parametrize("form", ["local", "local, torch", "outer"])
def test_ranks_in_different_steps_do_not_average(form: str) -> None:
    def program(group: pycomm.Group) -> None:
        module = perceptron()
        outer = torch.optim.SGD(module.parameters(), lr=1.0) if form == "outer" else None
        name = "local" if form == "outer" else form
        made = trained(name, module, torch.optim.AdamW(module.parameters()), outer=outer)
        made.stepper.k_steps = 2 + group.rank
        with pytest.raises(Mismatch, match="pass"):
            for step in range(20):
                step_on(made.model, batch(group.rank, step), made.stepper)

    run_ranks(2, program, timeout_s=20)


@pytest.mark.parametrize("nesterov", [False, True])
def test_an_optimizer_state_loaded_after_dgc_gives_its_velocity(nesterov: bool) -> None:
    """Dense steps: those of torch's SGD, which trained before."""

    def sgd(module: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(module.parameters(), 0.1, 0.9, nesterov=nesterov)

    def first(group: pycomm.Group) -> Any:
        module = perceptron()
        optimizer, model = sgd(module), pycomm.DataParallel(module)
        for step in range(4):
            step_on(model, batch(group.rank, step), optimizer)
        return module.state_dict(), optimizer.state_dict()

    def second(group: pycomm.Group, saved: Any) -> list[Tensor]:
        module = perceptron(2)
        optimizer = sgd(module)
        made = trained("dgc dense", module, optimizer)
        made.module.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        for step in range(4, 8):
            step_on(made.model, batch(group.rank, step), optimizer)
        return parameters(module)

    found = run_ranks(2, second, run_ranks(2, first)[0])
    want = alone(perceptron(), 8, 2, sgd)
    for got, one in zip(found[0], want, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", [*LOCAL, *PLAIN])
def test_weights_loaded_after_the_wrapper_are_trained(form: str) -> None:
    def program(group: pycomm.Group) -> list[Tensor]:
        module = perceptron()
        made = trained(form, module, torch.optim.SGD(module.parameters(), lr=0.0))
        step_on(made.model, batch(group.rank, 0), made.stepper)
        step_on(made.model, batch(group.rank, 1), made.stepper)
        module.load_state_dict(perceptron(5).state_dict())
        for step in range(4):
            step_on(made.model, batch(group.rank, step), made.stepper)
        return parameters(module)

    for found in run_ranks(2, program):
        for got, want in zip(found, parameters(perceptron(5)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", LOCAL)
@pytest.mark.parametrize("model_first", [True, False])
def test_the_order_of_loading_does_not_matter(form: str, model_first: bool) -> None:
    def program(group: pycomm.Group) -> None:
        def make() -> Trained:
            module = perceptron()
            return trained(form, module, momentum_sgd(module))

        def steps(made: Trained, first: int, last: int) -> list[Tensor]:
            for step in range(first, last):
                step_on(made.model, batch(group.rank, step), made.stepper)
            return parameters(made.module)

        one = make()
        steps(one, 0, 3)
        saved = one.saved()
        wanted = steps(one, 3, 6)
        two = make()
        order = [0, 1, 2] if model_first else [2, 1, 0]
        for i in order:
            [two.module, two.optimizer, two.holder][i].load_state_dict(copy.deepcopy(saved[i]))
        assert equal(wanted, steps(two, 3, 6))

    run_ranks(2, program)


def test_different_weights_loaded_raise() -> None:
    def program(group: pycomm.Group) -> None:
        made = trained("topk", perceptron())
        made.module.load_state_dict(perceptron(group.rank + 5).state_dict())
        with pytest.raises(Mismatch, match="loaded different weights"):
            step_on(made.model, batch(group.rank, 0), made.stepper)

    run_ranks(2, program)


def test_one_rank_sends_the_residuals_of_several() -> None:
    def several(group: pycomm.Group) -> Any:
        made = trained("quantize", Line())
        made.step(lambda model: model(data(group.rank, 0)))
        return made.holder.gather_state(0)

    gathered = run_ranks(2, several)[0]
    rest = unsent("quantize", Line, gathered)[0]
    assert bool(rest.any())

    def one(group: pycomm.Group) -> list[Tensor]:
        made = trained("quantize", Line())
        made.holder.load_state_dict(gathered)
        found = []
        for _ in range(2):
            made.step(lambda model: model(torch.zeros(96)))
            found.append(made.module.w.detach().clone())
        return found

    for found in run_ranks(1, one)[0]:
        torch.testing.assert_close(found, -rest)
