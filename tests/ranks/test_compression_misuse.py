"""Programs that would train ranks apart, or lose what was loaded: they raise, or are right.
For every compression; ranks are threads.
"""

import copy
import io
from typing import Any

import pytest
import torch
from contract import (
    COMPRESSED,
    COUNT,
    DGC,
    GRADIENTS,
    LOCAL,
    PLAIN,
    Line,
    Trained,
    data,
    trained,
    unsent,
)
from on_ranks import on_ranks
from small_models import alone, batch, equal, momentum_sgd, parameters, perceptron, step_on
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import RandomSampler

import pycomm
from pycomm.errors import InvalidArgument, Mismatch
from pycomm.testing import run_ranks

DENSE = "none"
every = pytest.mark.parametrize("form", [*COMPRESSED, *PLAIN, DENSE])
gradients = pytest.mark.parametrize("form", [*GRADIENTS, DENSE])


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
        return made.module.a.detach(), states

    found = run_ranks(2, program)
    assert torch.equal(found[0][0], found[1][0])
    if form in DGC:
        return  # the dropped gradients of a failed pass are in no sum
    rest = torch.zeros(COUNT) if found[0][1] is None else unsent(form, Line, found[0][1])[0]
    total = sum(data(r, s) for r in range(2) for s in range(10)) / 2
    torch.testing.assert_close(rest - found[0][0], total, rtol=1e-5, atol=1e-4)


@on_ranks(2)
@pytest.mark.parametrize("form", [*DGC, *LOCAL, *PLAIN])
def test_a_parameter_group_added_late_raises(group: pycomm.Group, form: str) -> None:
    module = perceptron()
    optimizer = torch.optim.SGD(module[4].parameters(), lr=0.1, momentum=0.9)
    made = trained(form, module, optimizer, unused=False)
    step_on(made.model, batch(group.rank, 0), made.stepper)
    optimizer.add_param_group({"params": [*module[0].parameters()]})
    with pytest.raises(InvalidArgument, match="add_param_group"):
        step_on(made.model, batch(group.rank, 1), made.stepper)


def unfreeze(made: Trained) -> None:
    made.module[0].requires_grad_(True)


def assign(made: Trained) -> None:
    made.module.load_state_dict(perceptron(3).state_dict(), assign=True)


def replace(made: Trained) -> None:
    made.module[4] = nn.Linear(20, 3)


def grow(made: Trained) -> None:
    made.module.extra = nn.Parameter(torch.ones(3))


@on_ranks(2)
@pytest.mark.parametrize("change", [unfreeze, assign, replace, grow], ids=lambda f: f.__name__)
@every
def test_a_parameter_that_came_after_the_wrapper_raises(
    group: pycomm.Group, form: str, change: Any
) -> None:
    module = perceptron()
    module[0].requires_grad_(False)
    made = trained(form, module, torch.optim.SGD(module.parameters(), lr=0.1))
    step_on(made.model, batch(group.rank, 0), made.stepper)
    change(made)
    with pytest.raises(InvalidArgument, match=r"'(0|2|4)\.weight'|'extra'|'0\.0'"):
        step_on(made.model, batch(group.rank, 1), made.stepper)


@on_ranks(2)
@gradients
def test_a_wrapper_is_neither_copied_nor_saved(group: pycomm.Group, form: str) -> None:
    made = trained(form, perceptron())
    for use in (copy.deepcopy, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(InvalidArgument, match=r"\.module"):
            use(made.model)
    twin = copy.deepcopy(made.module)
    torch.save(twin, io.BytesIO())
    step_on(made.model, batch(group.rank, 0), made.stepper)


@on_ranks(2, timeout_s=20)
@gradients
def test_an_omitted_backward_pass_raises(group: pycomm.Group, form: str) -> None:
    """On both ranks, at once, with the numbers of the passes."""
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


@on_ranks(2)
@gradients
def test_one_rank_may_evaluate_by_itself(group: pycomm.Group, form: str) -> None:
    made = trained(form, perceptron(), unused=False)
    step_on(made.model, batch(group.rank, 0), made.stepper)
    if group.rank == 1:  # with gradients that are not used
        made.model.eval()
        made.model(batch(group.rank, 1)[0])
        made.model.train()
    step_on(made.model, batch(group.rank, 2), made.stepper)


@on_ranks(2)
def test_a_hook_on_gradients_that_come_in_another_order_raises(group: pycomm.Group) -> None:
    one, other = (nn.Parameter(torch.ones(8)) for _ in range(2))
    average = pycomm.make_allreduce_cb("mean")
    for p in (one, other):
        p.register_post_accumulate_grad_hook(average)
    (one.sum() + other.sum()).backward()
    with pytest.raises(Mismatch, match="pass 2"):
        (one if group.rank == 0 else other).sum().backward()


@on_ranks(2, timeout_s=20)
@pytest.mark.parametrize("form", ["local", "local, torch", "outer"])
def test_ranks_in_different_steps_do_not_average(group: pycomm.Group, form: str) -> None:
    module = perceptron()
    outer = torch.optim.SGD(module.parameters(), lr=1.0) if form == "outer" else None
    name = "local" if form == "outer" else form
    made = trained(name, module, torch.optim.AdamW(module.parameters()), outer=outer)
    made.stepper.k_steps = 2 + group.rank
    with pytest.raises(Mismatch, match="pass"):
        for step in range(20):
            step_on(made.model, batch(group.rank, step), made.stepper)


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


@on_ranks(2)
@pytest.mark.parametrize("form", [*LOCAL, *PLAIN])
def test_weights_loaded_after_the_wrapper_are_trained(group: pycomm.Group, form: str) -> None:
    module = perceptron()
    made = trained(form, module, torch.optim.SGD(module.parameters(), lr=0.0))
    step_on(made.model, batch(group.rank, 0), made.stepper)
    step_on(made.model, batch(group.rank, 1), made.stepper)
    module.load_state_dict(perceptron(5).state_dict())
    for step in range(4):
        step_on(made.model, batch(group.rank, step), made.stepper)
    found = parameters(module)
    for got, want in zip(found, parameters(perceptron(5)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("form", LOCAL)
@pytest.mark.parametrize("model_first", [True, False])
def test_the_order_of_loading_does_not_matter(
    group: pycomm.Group, form: str, model_first: bool
) -> None:
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


@on_ranks(2)
def test_different_weights_loaded_raise(group: pycomm.Group) -> None:
    made = trained("topk", perceptron())
    made.module.load_state_dict(perceptron(group.rank + 5).state_dict())
    with pytest.raises(Mismatch, match="loaded different weights"):
        step_on(made.model, batch(group.rank, 0), made.stepper)


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
            made.step(lambda model: model(torch.zeros(COUNT)))
            found.append(made.module.a.detach().clone())
        return found

    for found in run_ranks(1, one)[0]:
        torch.testing.assert_close(found, -rest)


@pytest.mark.parametrize("form", ["local", "topk"])
def test_gradients_are_not_divided_by_the_loss_scale_twice(form: str) -> None:
    def program(group: pycomm.Group, inner: bool) -> list[Tensor]:
        module = perceptron()
        made = trained(form, module, torch.optim.SGD(module.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        x, y = batch(group.rank, 0)
        scaler.scale(F.mse_loss(made.model(x), y)).backward()
        scaler.unscale_(made.optimizer if inner else made.stepper)
        if inner:
            with pytest.raises(InvalidArgument, match=r"unscale_\(local\)"):
                scaler.step(made.stepper)
        else:
            scaler.step(made.stepper)
        return parameters(module)

    def plain(group: pycomm.Group) -> list[Tensor]:
        module = perceptron()
        made = trained(form, module, torch.optim.SGD(module.parameters(), lr=0.1))
        step_on(made.model, batch(group.rank, 0), made.stepper)
        return parameters(module)

    run_ranks(2, program, True)
    assert equal(run_ranks(2, program, False)[0], run_ranks(2, plain)[0])


@pytest.mark.parametrize("nesterov", [False, True])
def test_decay_without_correction_is_torchs_in_dense_steps(nesterov: bool) -> None:
    """And of uncompressed parameters in each step."""

    def sgd(module: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(module.parameters(), 0.1, 0.9, weight_decay=0.1, nesterov=nesterov)

    def program(group: pycomm.Group, form: str) -> list[Tensor]:
        module = perceptron()
        optimizer = sgd(module)
        made = trained(form, module, optimizer, decay_correction=False)
        for step in range(6):
            step_on(made.model, batch(group.rank, step), optimizer)
        return parameters(module)

    want = alone(perceptron(), 6, 2, sgd)
    for form in ("dgc dense", "dgc small"):
        for got, one in zip(run_ranks(2, program, form)[0], want, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("evaluate", [False, True])
def test_two_forward_passes_with_buffers_before_one_backward(evaluate: bool) -> None:
    def make() -> nn.Module:
        module = nn.Sequential(perceptron(), nn.BatchNorm1d(3), nn.Linear(3, 1))
        for p in module[2].parameters():
            nn.init.constant_(p, 0.5)
        module[1].train(not evaluate)
        return module

    def loss(model: Any, rank: int) -> Tensor:
        return model(batch(rank, 0)[0]).square().mean() - model(batch(rank, 1)[0]).mean()

    def program(group: pycomm.Group) -> list[Tensor]:
        module = make()
        model = pycomm.DataParallel(module)
        loss(model, group.rank).backward()
        return [p.grad.clone() for p in module.parameters()]

    alone_on = [make() for _ in range(2)]
    for rank, module in enumerate(alone_on):
        loss(module, rank).backward()
    for found in run_ranks(2, program):
        pairs = zip(found, *(module.parameters() for module in alone_on), strict=True)
        for got, one, other in pairs:
            torch.testing.assert_close(got, (one.grad + other.grad) / 2, rtol=1e-5, atol=1e-6)


@on_ranks(1)
@pytest.mark.parametrize("form", ["dgc", "quantize", "topk", "local", DENSE])
def test_a_lazy_module_is_named(group: pycomm.Group, form: str) -> None:
    module = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(InvalidArgument, match="dummy forward pass"):
        trained(form, module)


NAN, INF = float("nan"), float("inf")
WRONG: list[tuple[str, dict[str, Any]]] = [
    *(("local", {"k_steps": x}) for x in (0, 1.5, NAN, INF, True, "2", None)),
    *(("local", {"begin_step": x}) for x in (0, 1.5, NAN)),
    *(("local", {name: "x"}) for name in ("outer", "muon", "group", "clip_norm")),
    *(("local", {"group": x}) for x in (0, [], False)),
    *(("local", {"clip_norm": x}) for x in (0, NAN, INF, -1)),
    *(("dgc", {"sparsity": x}) for x in ([], [1.0], [NAN])),
    *(("dgc", {"rampup_step": x}) for x in (0, 1.5, NAN, INF)),
    *(("dgc", {"rampup_begin_step": x}) for x in (-1, 1.5, NAN)),
    *(("dgc", {"owner_k_factor": x}) for x in (0, 1.5, NAN)),
    *(("dgc", {"min_count": x}) for x in (-1, 1.5, NAN)),
]


@on_ranks(1)
@pytest.mark.parametrize(("form", "options"), WRONG, ids=str)
def test_an_option_is_checked_in_the_constructor(
    group: pycomm.Group, form: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument):
        trained(form, perceptron(), **options)


@on_ranks(1)
def test_options_of_data_parallel_are_checked(group: pycomm.Group) -> None:
    wrong: list[dict[str, Any]] = [
        *({"bucket_mb": x} for x in (0, NAN, INF, "x")),
        *({"bucket_layers": x} for x in (0, 1.5, NAN)),
        *({"group": x} for x in (0, "x", [])),
    ]
    for options in wrong:
        with pytest.raises(InvalidArgument):
            pycomm.DataParallel(perceptron(), **options)
    with pytest.raises(InvalidArgument, match="optimizer"):
        pycomm.LocalSGD(perceptron(), "x")


def test_clip_norm_of_a_sparse_embedding() -> None:
    def program(group: pycomm.Group, sparse: bool) -> Tensor:
        module = nn.Embedding(11, 8, sparse=sparse)
        nn.init.constant_(module.weight, 1.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        local = pycomm.LocalSGD(module, optimizer, clip_norm=0.5)
        module(torch.tensor([1, 1, 4 + group.rank])).square().sum().backward()
        local.step()
        return module.weight.detach()

    torch.testing.assert_close(*(run_ranks(2, program, sparse)[0] for sparse in (True, False)))


@pytest.mark.parametrize("sampler", [False, True])
def test_generators_with_different_seeds_raise(sampler: bool) -> None:
    def program(group: pycomm.Group, seed: int) -> list[int]:
        made = torch.Generator().manual_seed(seed * group.rank)
        rows = range(12)
        given = {"sampler": RandomSampler(rows, generator=made)} if sampler else {"shuffle": True}
        return [int(x) for x in pycomm.data.DataLoader(rows, None, generator=made, **given)]

    assert sorted(x for one in run_ranks(3, program, 0) for x in one) == [*range(12)]
    with pytest.raises(InvalidArgument, match="initial seeds"):
        run_ranks(3, program, 1)
