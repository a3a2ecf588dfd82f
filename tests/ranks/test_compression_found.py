"""Combinations that test_combinations.py found; test_compression_contract.py has the parts."""

from typing import Any

import pytest
import torch
from contract import COUNT, GRADIENTS, Line, Trained, compression_of, data, trained, unsent
from on_ranks import on_ranks
from small_models import seeded
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import Run, in_processes, run_fixture  # noqa: F401 - a fixture

import pycomm
from pycomm.testing import run_ranks


class Layers(nn.Module):
    """`branch` is the factor of the branch; None: it is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(8, 8), nn.Linear(8, 8)
        seeded(self, 0)

    def forward(self, x: Tensor, branch: float | None = None) -> Tensor:
        y: Tensor = torch.tanh(self.trunk(x))
        y = y if branch is None else y + branch * self.branch(y)
        return y.square().mean()


class Rows(nn.Module):
    """The gradient of `a` is the input; that of the rows is sparse, and that of `exact` float64."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(COUNT))
        self.rows = nn.Embedding(5, 8, sparse=True)
        self.exact = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.a * x).sum()
        return loss + self.rows(torch.tensor([1, 3])).sum() + self.exact.sum().float()


def batch(rank: int, step: int) -> Tensor:
    return data(rank, step).view(-1, 8)


def of(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), 0.1, 0.9, weight_decay=0.1)


@on_ranks(2)
@pytest.mark.parametrize("form", ["dgc", "muon"])
def test_frozen_parameters_may_be_in_the_optimizer(group: pycomm.Group, form: str) -> None:
    module = Layers()
    module.branch.requires_grad_(False)
    before = of(module.trunk), of(module.branch)
    if form == "muon":
        matrices = [p for p in module.parameters() if p.dim() == 2]
        rest = torch.optim.AdamW([p for p in module.parameters() if p.dim() != 2])
        made = trained("topk all", module, rest, muon=torch.optim.Muon(matrices, lr=0.02))
    else:
        made = trained(form, module, sgd(module), unused=False)
    made.step(lambda model: model(batch(group.rank, 0), 1.0))
    assert same(before[1], of(module.branch))
    assert not same(before[0], of(module.trunk))


@pytest.mark.parametrize("form", ["dgc", "dgc dense", "dgc model"])
def test_accumulation_on_gradients_of_zeros(form: str) -> None:
    """zero_grad(set_to_none=False), then passes under no_sync(): no misuse."""

    def program(group: pycomm.Group, to_none: bool) -> list[Tensor]:
        module = Layers()
        made = trained(form, module, sgd(module))
        for step in range(3):
            made.optimizer.zero_grad(set_to_none=to_none)
            with made.model.no_sync():
                for micro in range(2):
                    made.model(batch(group.rank, 10 * step + micro), 1.0).backward()
            made.model(batch(group.rank, 10 * step + 2), 1.0).backward()
            made.optimizer.step()
        return of(module)

    zeros, none = (run_ranks(2, program, to_none)[0] for to_none in (False, True))
    assert same(zeros, none)


@pytest.mark.parametrize("form", ["quantize", "quantize 3, 8"])
def test_a_rank_without_data_sends_its_residual_at_the_scale_of_others(form: str) -> None:
    batches = (1, 6)

    def program(group: pycomm.Group) -> tuple[Tensor, Any]:
        module = Line()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        compression = compression_of(form, module, optimizer, scaler)
        model = pycomm.DataParallel(module, compression=compression)
        with model.join(optimizer, scaler):
            for step in range(batches[group.rank]):
                optimizer.zero_grad()
                scaler.scale(model(data(group.rank, step))).backward()
                scaler.step(optimizer)
                scaler.update()
        return module.a.detach().clone(), compression.gather_state(0)

    found = run_ranks(2, program)
    rest = unsent(form, Line, found[0][1])[0]
    taken = [data(rank, step) for rank in range(2) for step in range(batches[rank])]
    wanted = torch.stack(taken).sum(0) / 2
    torch.testing.assert_close(rest - found[0][0], wanted, rtol=1e-5, atol=1e-4)


@on_ranks(2)
@pytest.mark.parametrize("where", ["a", "rows.weight", "exact"])
@pytest.mark.parametrize("form", GRADIENTS)
def test_an_overflow_skips_the_optimizer_of_uncompressed_gradients_too(
    group: pycomm.Group, form: str, where: str
) -> None:
    module, scaler = Rows(), pycomm.StaticLossScaler(4.0)
    one = torch.optim.SGD([("a", module.a)], lr=1.0)
    other = torch.optim.SGD([module.rows.weight, module.exact], lr=1.0)
    compression = compression_of(form, module, one, scaler)
    model = pycomm.DataParallel(module, compression=compression)
    for step in range(4):
        before, kept = of(module), compression.state_dict()
        handles = []
        if group.rank == 1 and step == 2:
            wrong = dict(module.named_parameters())[where]
            handles = [wrong.register_hook(lambda g: g * float("inf"))]
        for optimizer in (one, other):
            optimizer.zero_grad()
        scaler.scale(model(data(group.rank, step))).backward()
        for handle in handles:
            handle.remove()
        for optimizer in (one, other):
            scaler.step(optimizer)
        scaler.update()
        assert same(before, of(module)) == (step == 2), step
        if step == 2:
            for key in {"v", "residual"} & set(kept):
                now = compression.state_dict()[key]
                assert same(list(kept[key].values()), list(now.values()))


@pytest.mark.parametrize("form", ["dgc sharded model", "dgc fused sharded"])
def test_a_state_of_dgc_loads_into_a_model_with_frozen_layers(form: str) -> None:
    """Shards of the whole model then have other places; no residual is lost."""

    def program(group: pycomm.Group) -> tuple[Any, Tensor]:
        made = trained(form, Layers())
        for step in range(3):
            made.step(lambda model, step=step: model(batch(group.rank, step), 1.0))
        saved, gathered = made.holder.state_dict(), made.holder.gather_state(0)
        module = Layers()
        module.branch.requires_grad_(False)
        again = trained(form, module)
        again.holder.load_state_dict(saved)
        found = again.holder.state_dict()
        assert not found["owner_residual"]
        again.step(lambda model: model(batch(group.rank, 3), 1.0))
        return gathered, found["v"]["trunk.weight"]

    found = run_ranks(4, program)
    rest = unsent(form, Layers, found[0][0])[0].flatten()
    torch.testing.assert_close(sum(one[1] for one in found) / 4, rest)


@on_ranks(2)
@pytest.mark.parametrize("form", ["topk all", "local quantize"])
def test_a_skipped_step_is_no_use_of_a_parameter(group: pycomm.Group, form: str) -> None:
    module, scaler = Layers(), pycomm.StaticLossScaler(4.0)
    optimizer = torch.optim.AdamW(module.parameters(), 0.01, (0.0, 0.99), weight_decay=0.1)
    made = trained(form, module, optimizer)
    before = of(module.branch)
    for step in range(2):
        made.stepper.zero_grad()
        loss = module(batch(group.rank, step), 1.0 if step == 0 else None)
        wrong = float("inf") if step == 0 and group.rank == 1 else 1.0
        scaler.scale(loss * wrong).backward()
        scaler.step(made.stepper)
        scaler.update()
    assert same(before, of(module.branch))


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("form", ["topk all", "local quantize", "outer"])
def test_a_state_has_which_parameters_were_used(form: str, gathered: bool) -> None:
    """On rank 1, with a gradient of 0: neither the parameter nor the residual shows it."""

    def make() -> Trained:
        module = Layers()
        if form != "outer":
            optimizer = torch.optim.AdamW(module.parameters(), 0.01, (0.0, 0.99), weight_decay=0.1)
            return trained(form, module, optimizer, k_steps=2)
        outer = torch.optim.SGD(module.parameters(), 0.7, weight_decay=0.1)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        return trained("local", module, optimizer, k_steps=2, outer=outer)

    def program(group: pycomm.Group) -> None:
        one, two = make(), make()
        one.step(lambda model: model(batch(group.rank, 0)))  # up to begin_step all steps average
        before = of(one.module.branch)
        used = 0.0 if group.rank == 1 else None
        one.step(lambda model: model(batch(group.rank, 1), used))
        saved = one.saved()
        if gathered and form != "outer":
            states = [one.holder.gather_state(dst) for dst in range(group.size)]
            saved[2] = states[group.rank]
        two.load(saved)
        for made in (one, two):
            made.step(lambda model: model(batch(group.rank, 2)))
        assert not same(before, of(one.module.branch))
        assert same(of(one.module), of(two.module))

    run_ranks(2, program)


@in_processes(2)
@pytest.mark.parametrize("form", ["dgc", "quantize"])
def test_a_layer_frozen_before_the_first_pass_of_ddp(form: str) -> None:
    module = Layers()
    optimizer = torch.optim.SGD(module.named_parameters(), lr=1.0)
    compression = compression_of(form, module, optimizer, None)
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    hook = pycomm.dgc_hook if form == "dgc" else pycomm.quantize_hook
    ddp.register_comm_hook(compression, hook)
    module.branch.requires_grad_(False)
    before = of(module.branch)
    for step in range(3):
        optimizer.zero_grad()
        ddp(batch(torch.distributed.get_rank(), step), 1.0).backward()
        optimizer.step()
    assert same(before, of(module.branch))
