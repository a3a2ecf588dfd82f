"""The required properties of DGC, P1 to P8, against torch's SGD and a second implementation.

Ranks are threads; dgc_model.py is the second implementation. Loss scales and processes:
test_dgc_steps.py. Failures: test_dgc_failures.py. States: test_dgc_states.py.
"""

import copy
import math
from typing import Any

import pytest
import torch
from dgc_model import Model
from on_ranks import on_ranks
from small_models import alone, batch, equal, parameters, perceptron, step_on, whole_batch
from torch import Tensor, nn
from torch.nn import functional as F

import pycomm
from pycomm.compress.dense import clip_gradients
from pycomm.compress.schedule import Load, SparsityWarmup, received_bytes, to_send
from pycomm.errors import InvalidArgument
from pycomm.testing import run_ranks

RATE = 0.05
EVERYTHING = {"min_count": 1, "exchange": "gather"}


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": RATE, "momentum": 0.9, **options})


def double(seed: int = 1) -> nn.Module:
    return perceptron(seed).double()


def data(rank: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, y = batch(rank, step)
    return x.to(dtype), y.to(dtype)


def train(
    group: pycomm.Group,
    model: nn.Module,
    steps: int,
    options: dict[str, Any],
    optimizer_options: dict[str, Any] | None = None,
    form: dict[str, Any] | None = None,
) -> tuple[list[list[Tensor]], pycomm.DGC]:
    """Trains a copy of `model`; the parameters after each step, and the DGC."""
    module = copy.deepcopy(model)
    optimizer = sgd(module, **(optimizer_options or {}))
    dgc = pycomm.DGC(optimizer, **{**EVERYTHING, **options})
    parallel = pycomm.DataParallel(module, compression=dgc, **(form or {}))
    dtype = next(module.parameters()).dtype
    seen = []
    for step in range(steps):
        step_on(parallel, data(group.rank, step, dtype), optimizer)
        seen.append(parameters(module))
    return seen, dgc


def last(ranks: int, model: nn.Module, steps: int, *settings: Any) -> list[Tensor]:
    """The parameters after `steps`, checked to be equal on all ranks."""

    def program(group: pycomm.Group) -> list[Tensor]:
        return train(group, model, steps, *settings)[0][-1]

    results = run_ranks(ranks, program)
    assert all(equal(result, results[0]) for result in results)
    return results[0]


def far(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


RANKS = pytest.mark.parametrize(("ranks", "steps"), [(2, 60), (3, 5), (64, 5)])


@RANKS
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 1e-2])
@pytest.mark.parametrize("select", ["parameter", "model"])
def test_p1_all_sent_without_masking_is_momentum_sgd(
    nesterov: bool, decay: float, select: str, ranks: int, steps: int
) -> None:
    options = {"sparsity": [0.0], "masking": False, "select": select}
    optimizer = {"nesterov": nesterov, "weight_decay": decay}
    got = last(ranks, double(), steps, options, optimizer)
    wanted = alone(double(), steps, ranks, lambda m: sgd(m, **optimizer), torch.float64)
    assert far(got, wanted) <= 4e-15


@RANKS
@pytest.mark.parametrize("nesterov", [False, True])
def test_p2_all_sent_with_masking_is_sgd_without_momentum(
    nesterov: bool, ranks: int, steps: int
) -> None:
    got = last(ranks, double(), steps, {"sparsity": [0.0]}, {"nesterov": nesterov})
    rate = RATE * (1.9 if nesterov else 1.0)
    wanted = alone(double(), steps, ranks, lambda m: sgd(m, momentum=0.0, lr=rate), torch.float64)
    assert far(got, wanted) <= 4e-15


DECAY = 1e-2


def beside_the_second_model(
    group: pycomm.Group, steps: int, nesterov: bool, clip: float | None, more: dict[str, Any]
) -> list[list[Tensor]]:
    """The parameters after each step, for `agrees`."""
    options = {"sparsity": [0.9], "clip_norm": clip, **more}
    return train(group, double(), steps, options, {"nesterov": nesterov, "weight_decay": DECAY})[0]


def agrees(
    got: list[list[list[Tensor]]], nesterov: bool, clip: float | None, more: dict[str, Any]
) -> None:
    """P4, P5: by rank and step; with select="model" the second model has one parameter for all."""
    assert all(equal(a, b) for other in got[1:] for a, b in zip(got[0], other, strict=True))
    ranks, whole = len(got), more.get("select") == "model"
    for sums in (False, True):
        twin = double()
        shapes = [p.shape for p in twin.parameters()]
        cuts = [sum(n.numel() for n in shapes)] if whole else [n.numel() for n in shapes]
        every = torch.cat([p.detach().flatten() for p in twin.parameters()])
        masking = more.get("masking", True)
        models = [
            Model(w, ranks, 0.9, DECAY, nesterov, masking, clip, sums) for w in every.split(cuts)
        ]
        for step, after in enumerate(got[0]):
            by_rank = []
            for rank in range(ranks):
                x, y = data(rank, step, torch.float64)
                found = torch.autograd.grad(F.mse_loss(twin(x), y), list(twin.parameters()))
                by_rank.append(torch.cat([g.flatten() for g in found]).split(cuts))
            for one, gradients in zip(models, zip(*by_rank, strict=True), strict=True):
                one.step(gradients, max(1, round(one.w.numel() * (1 - 0.9))), RATE)
            parts = torch.cat([one.w for one in models]).split([n.numel() for n in shapes])
            for p, part in zip(twin.parameters(), parts, strict=True):
                p.data.copy_(part.view(p.shape))
            assert far(after, parameters(twin)) < 1e-13, step


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("more", [{}, {"masking": False}, {"select": "model", "clip": "global"}])
def test_the_second_model_agrees(nesterov: bool, clip: float | None, more: dict[str, Any]) -> None:
    """Step by step, in float64; its sum convention too (P4)."""
    given = nesterov, clip, more
    agrees(run_ranks(3, beside_the_second_model, 8, *given), *given)


@pytest.mark.parametrize("options", [{}, {"clip": "global"}, {"min_count": 100}])
def test_dense_gradients_are_clipped_after_averaging(options: dict[str, Any]) -> None:
    """To C, for any number of ranks, and before the decay."""
    optimizer = {"weight_decay": DECAY}
    begin = 0 if "min_count" in options else 10**6
    dense = {"rampup_begin_step": begin, "clip_norm": 0.05, **options, "min_count": 10**6}
    got = last(3, double(), 6, dense, optimizer)
    one = double()
    theirs = sgd(one, **optimizer)
    for step in range(6):
        x, y = whole_batch(3, step)
        theirs.zero_grad()
        F.mse_loss(one(x.double()), y.double()).backward()
        gradients = [p.grad for p in one.parameters()]
        norms = [float(g.norm()) for g in gradients]
        together = math.hypot(*norms)
        for g, norm in zip(gradients, norms, strict=True):
            g.mul_(min(1.0, 0.05 / (together if options.get("clip") == "global" else norm)))
        theirs.step()
    assert together > 0.05
    assert far(got, parameters(one)) < 1e-14


@pytest.mark.parametrize("together", [False, True])
def test_an_average_that_is_not_finite_is_not_clipped(together: bool) -> None:
    for wrong in (math.nan, math.inf):
        gradient = torch.tensor([3.0, wrong, 4.0])
        clip_gradients([gradient], 1.0, together)
        assert gradient.tolist()[::2] == [3.0, 4.0]


@pytest.mark.parametrize(
    "optimizer", [{}, {"nesterov": True, "weight_decay": 1e-2}, {"momentum": 0.0}]
)
def test_p6_dense_phase_equals_torch_sgd(optimizer: dict[str, Any]) -> None:
    def dense(group: pycomm.Group) -> list[Tensor]:
        module = perceptron()
        theirs = sgd(module, **optimizer)
        model = pycomm.DataParallel(module)
        for step in range(8):
            step_on(model, batch(group.rank, step), theirs)
        return parameters(module)

    got = last(2, perceptron(), 8, {"rampup_begin_step": 8}, optimizer)
    assert equal(got, run_ranks(2, dense)[0])


@pytest.mark.parametrize("nesterov", [False, True])
def test_switch_from_dense_to_sparse_is_continuous(nesterov: bool) -> None:
    """With everything sent and no masking the switch has no effect."""
    options = {"rampup_begin_step": 5, "sparsity": [0.0], "masking": False}
    got = last(2, double(), 12, options, {"nesterov": nesterov})
    wanted = alone(double(), 12, 2, lambda m: sgd(m, nesterov=nesterov), torch.float64)
    assert far(got, wanted) <= 4e-15


@pytest.mark.parametrize("options", [{}, {"select": "model"}, {"clip_norm": 0.1, "clip": "global"}])
def test_p8_buckets_and_lanes_change_no_bit(options: dict[str, Any]) -> None:
    settings = {"sparsity": [0.95], **options}
    forms: list[dict[str, Any]] = [{}, {"bucket_layers": 1}, {"bucket_mb": 1e-5, "lanes": 3}]
    results = [last(3, perceptron(), 6, settings, {}, form) for form in forms]
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


@pytest.mark.parametrize("min_count", [1, 100])
def test_dense_masked_equals_gather_to_rounding(min_count: int) -> None:
    """min_count 100 leaves some parameters dense in the same model."""
    results = [
        last(4, double(), 10, {"sparsity": [0.9], "exchange": exchange, "min_count": min_count})
        for exchange in ("gather", "dense_masked")
    ]
    assert far(*results) < 1e-14


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_without_a_correction_the_optimizer_does_it(
    momentum: bool, decay: bool, sparsity: float
) -> None:
    """With everything sent it is the same SGD; with a tenth it differs.

    Only momentum is equal: decay is then decoupled from the momentum, as in SGDW.
    """
    if sparsity == 0 and momentum and not decay:
        return
    options = {"masking": False, "sparsity": [sparsity], "select": "model"}
    options |= {"momentum_correction": momentum, "decay_correction": decay}
    optimizer = {"weight_decay": 1e-2, "nesterov": True}
    got = last(2, double(), 12, options, optimizer)
    if sparsity == 0:
        wanted = alone(double(), 12, 2, lambda m: sgd(m, **optimizer), torch.float64)
        assert far(got, wanted) <= 4e-15
    elif not (momentum and decay):
        all_of_it = {**options, "momentum_correction": True, "decay_correction": True}
        assert far(got, last(2, double(), 12, all_of_it, optimizer)) > 1e-4


@pytest.mark.parametrize(
    ("count", "sparsity", "by_rule"),
    [
        (10**6, 0.999, {"round": 1000, "paddle": 999, "ceil": 1000}),
        (16384, 0.999, {"round": 16, "paddle": 16, "ceil": 17}),
        (10, 0.999, {"round": 1, "paddle": 1, "ceil": 1}),
        (10, 0.75, {"round": 2, "paddle": 2, "ceil": 3}),
        (3500, 0.999, {"round": 4, "paddle": 3, "ceil": 4}),
        (7, 0.0, {"round": 7, "paddle": 7, "ceil": 7}),
    ],
)
def test_how_many_are_sent(count: int, sparsity: float, by_rule: dict[str, int]) -> None:
    assert {rule: to_send(count, sparsity, rule) for rule in by_rule} == by_rule


def test_warm_up_schedule() -> None:
    def levels_at(steps: range, begin: int, length: int, levels: int) -> list[int | None]:
        warmup = SparsityWarmup.of(begin, length, [0.5] * levels)
        return [warmup.level_at(step) for step in steps]

    at = levels_at(range(130), 2, 100, 5)
    assert at[:2] == [None, None]
    assert [at.index(level) for level in range(5)] == [2, 22, 42, 62, 82]
    assert at[-1] == 4
    assert levels_at(range(3), 0, 1, 1) == [0, 0, 0]
    assert levels_at(range(3), 0, 1, 4) == [0, 3, 3]
    epoch = 1252  # steps, in the examples of Paddle's page
    levels = levels_at(range(6 * epoch), 2 * epoch, 3 * epoch, 3)
    assert levels == [None] * 2 * epoch + [0] * epoch + [1] * epoch + [2] * 2 * epoch
    assert levels_at(range(4 * epoch - 1, 4 * epoch + 2), 4 * epoch, 1, 1) == [None, 0, 0]
    assert SparsityWarmup.of(0, 1, 0.999).sparsity == (0.999,)
    for wrong in (
        (-1, 1, [0.5]),
        (0, 1, []),
        (float("nan"), 1, [0.5]),
        (0, 1.5, [0.5]),
        (0, 0, [0.5]),
        (0, 1, [1.0]),
        (0, 1, [0.9, 0.5]),
        (0, 1, [-0.1]),
    ):
        with pytest.raises(InvalidArgument):
            SparsityWarmup.of(*wrong)


@pytest.mark.parametrize(("size", "even"), [(4, 0.75), (16, 0.9375), (64, 0.984375), (1000, 0.999)])
def test_packets_are_sent_only_if_smaller(size: int, even: float) -> None:
    """They break even if size * (1 - sparsity) is 1."""
    count = 10**6
    for sparsity, sign in ((even - 1e-4, 1), (even, 0), (even + 1e-4, -1)):
        found = received_bytes(Load([to_send(count, sparsity)], [count], 4, None), size)
        assert (found["gather"] > found["dense_masked"]) - (
            found["gather"] < found["dense_masked"]
        ) == sign


def test_the_exchange_follows_the_level() -> None:
    def program(group: pycomm.Group) -> list[tuple[Any, ...]]:
        module = perceptron()
        optimizer = sgd(module)
        dgc = pycomm.DGC(
            optimizer, 1, 4, [0.5, 0.75, 0.9375, 0.999], min_count=100, exchange="auto"
        )
        model = pycomm.DataParallel(module, compression=dgc)
        seen = []
        for step in range(6):
            step_on(model, batch(group.rank, step), optimizer)
            stats = dgc.stats()
            seen.append((stats["level"], stats["exchange"], stats["k"], stats["sent_bytes"]))
            assert stats["dense_bytes"] == 4 * (528 + 33 + 660 + 20 + 60 + 3)
        return seen

    rest = 4 * (33 + 20 + 60 + 3)
    whole = rest + 4 * (528 + 660)
    levels = run_ranks(4, program)
    assert levels[0] == levels[3]
    assert levels[0] == [
        (None, "dense", 0, whole),
        (0.5, "dense_masked", 264 + 330, whole),
        (0.75, "gather", 132 + 165, rest + 8 * (132 + 165)),  # the same number of bytes sent
        (0.9375, "gather", 33 + 41, rest + 8 * (33 + 41)),
        (0.999, "gather", 2, rest + 16),
        (0.999, "gather", 2, rest + 16),
    ]


def test_schedulers_take_effect_and_param_groups_show_current_values() -> None:
    """Rate, momentum and decay of one of two groups change in the run, as in torch's own SGD."""

    def grouped(module: nn.Module) -> torch.optim.SGD:
        first, *others = module.parameters()
        groups = [{"params": others}, {"params": [first], "lr": 2 * RATE, "weight_decay": DECAY}]
        return torch.optim.SGD(groups, lr=RATE, momentum=0.9)

    def change(optimizer: torch.optim.SGD, step: int) -> None:
        optimizer.param_groups[0].update(lr=RATE / (1 + step), momentum=0.9 - 0.05 * step)
        optimizer.param_groups[0]["weight_decay"] = 1e-3 * step

    def program(group: pycomm.Group) -> list[Tensor]:
        module = double()
        optimizer = grouped(module)
        dgc = pycomm.DGC(optimizer, sparsity=[0.0], masking=False, **EVERYTHING)
        model = pycomm.DataParallel(module, compression=dgc)
        for step in range(8):
            change(optimizer, step)
            step_on(model, data(group.rank, step, torch.float64), optimizer)
            assert optimizer.param_groups[0]["momentum"] == 0.9 - 0.05 * step
        return parameters(module)

    one = double()
    optimizer = grouped(one)
    for step in range(8):
        change(optimizer, step)
        x, y = zip(*(data(rank, step, torch.float64) for rank in range(2)), strict=True)
        step_on(one, (torch.cat(x), torch.cat(y)), optimizer)
    assert far(run_ranks(2, program)[0], parameters(one)) <= 4e-15


@on_ranks(2)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("begin", [0, 10**6])
def test_velocity_is_adopted_from_the_optimizer_and_returned(
    group: pycomm.Group, nesterov: bool, begin: int
) -> None:
    module = double()
    optimizer = sgd(module, nesterov=nesterov)
    model = pycomm.DataParallel(module)
    for step in range(3):
        step_on(model, data(group.rank, step, torch.float64), optimizer)
    dgc = pycomm.DGC(optimizer, begin, sparsity=[0.0], masking=False, **EVERYTHING)
    del model
    compressed = pycomm.DataParallel(module, compression=dgc)
    for step in range(3, 6):
        step_on(compressed, data(group.rank, step, torch.float64), optimizer)
    dgc.detach()
    dgc.detach()  # once is enough
    del compressed
    model = pycomm.DataParallel(module)
    for step in range(6, 9):
        step_on(model, data(group.rank, step, torch.float64), optimizer)
    wanted = alone(double(), 9, 2, lambda m: sgd(m, nesterov=nesterov), torch.float64)
    assert far(parameters(module), wanted) <= 4e-15
