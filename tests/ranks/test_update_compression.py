"""LocalSGD with TopK and Quantize: equal replicas, bytes and faults."""

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from small_models import batch, equal, parameters, perceptron, seeded, step_on
from torch import Tensor, nn
from torch.nn import functional as F
from update_training import (
    BOTH,
    EXACT,
    FEW_BITS,
    SHARDED,
    Compression,
    adamw,
    big_model,
    residuals,
    sgd,
)

import pycomm
from pycomm import Quantize, TopK
from pycomm.compress import quantized_updates, topk_updates
from pycomm.errors import Mismatch
from pycomm.testing import run_ranks

RANKS = pytest.mark.parametrize("ranks", [2, 4])


@on_ranks(2)
@pytest.mark.parametrize("exchange", ["gather", "sharded"])
def test_all_values_of_full_precision_are_the_mean_of_updates(
    group: pycomm.Group, exchange: str
) -> None:
    """The mean of AdamW's parameters, weight decay included."""
    model, twin = perceptron(), perceptron()
    compression = dataclasses.replace(EXACT, exchange=exchange)
    local = pycomm.LocalSGD(model, adamw(model), compression=compression)
    optimizer = adamw(twin)
    for step in range(4):
        step_on(model, batch(group.rank, step), local)
        step_on(twin, batch(group.rank, step), optimizer)
        for p in twin.parameters():
            p.data.copy_(pycomm.all_reduce(p.detach().clone(), "avg"))
    assert local.optimizer.param_groups[0]["weight_decay"] == 0.1
    found, wanted = parameters(model), parameters(twin)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("k_steps", [1, 3])
@BOTH
def test_decay_is_no_part_of_the_updates(
    group: pycomm.Group, compression: Compression, k_steps: int
) -> None:
    """With gradients of 0 nothing is sent, and theta shrinks on all ranks, in all elements."""
    model = perceptron()
    local = pycomm.LocalSGD(model, adamw(model), k_steps, compression=compression)
    start = parameters(model)
    for _ in range(k_steps + 1):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        local.step()
    assert local.last_sync == k_steps + 1
    assert not any(bool(e.any()) for e in residuals(local))
    factor = 1.0
    for _ in range(k_steps):
        factor *= 1 - 0.01 * 0.1
    assert equal([s * (1 - 0.01 * 0.1) * factor for s in start], parameters(model))


@on_ranks(2)
@BOTH
def test_weight_decay_must_be_equal_on_all_ranks(
    group: pycomm.Group, compression: Compression
) -> None:
    """Otherwise the replicas would differ: every rank raises, and nothing changes."""
    model = perceptron()
    local = pycomm.LocalSGD(model, adamw(model, lr=0.01 + group.rank), compression=compression)
    start = parameters(model)
    with pytest.raises(Mismatch, match="learning rate or weight decay"):
        step_on(model, batch(group.rank, 0), local)
    assert equal(start, parameters(model))
    if isinstance(compression, TopK):
        other = dataclasses.replace(compression, group=4 << group.rank)
        differing = pycomm.LocalSGD(model, sgd(model), compression=other)
        with pytest.raises(Mismatch, match="or in TopK"):
            step_on(model, batch(group.rank, 0), differing)
        assert equal(start, parameters(model))
    plain = pycomm.LocalSGD(
        model, adamw(model, lr=0.01 + group.rank, weight_decay=0.0), compression=compression
    )
    step_on(model, batch(group.rank, 0), plain)  # rates of their own are fine without decay


def written_in_a_step(group: pycomm.Group, compression: Compression) -> tuple[float, Any]:
    """The bytes that this rank writes on average, headers of frames included; and the stats."""
    model = big_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local = pycomm.LocalSGD(model, adamw(model), compression=compression)
    step_on(model, batch(group.rank, 0), local)
    before = group.stats().bytes_written
    for step in range(1, 9):
        step_on(model, batch(group.rank, step), local)
    return (group.stats().bytes_written - before) / 8, local.stats()


@RANKS
@pytest.mark.parametrize(
    "compression",
    [
        TopK(ratio=200),
        TopK(ratio=50),
        TopK(ratio=500, group=4),
        TopK(ratio=32),
        TopK(ratio=100, group=1, value_dtype="3bit"),
        TopK(ratio=16, value_dtype="2bit"),
    ],
    ids=str,
)
def test_bytes_on_the_transport(ranks: int, compression: TopK) -> None:
    """Per peer at most 1 / 0.97 of what was asked for."""
    dense = 4 * sum(p.numel() for p in big_model().parameters())
    for written, stats in run_ranks(ranks, written_in_a_step, compression):
        assert compression.ratio is not None
        assert stats["dense_bytes"] == dense
        assert dense / written * (ranks - 1) >= 0.97 * compression.ratio
        assert dense / stats["sent_bytes"] <= 1.35 * compression.ratio  # k uses what was asked for


@pytest.mark.parametrize("ranks", [4, 8])
def test_owners_bound_the_bytes(ranks: int) -> None:
    """A rank sends its k groups to the owners, and the owners at most factor * k groups to all
    ranks: fewer where ranks select the same groups, which depends on torch's arithmetic."""
    budget = 4 * sum(p.numel() for p in big_model().parameters()) / 50
    sent_once = (ranks - 1) / ranks * budget
    headers = 256 * (ranks - 1)
    written = {}
    for factor in (1, 4):
        compression = TopK(ratio=50, exchange="sharded", owner_k_factor=factor)
        results = run_ranks(ranks, written_in_a_step, compression)
        assert results[0][1]["exchange"] == "sharded"
        written[factor] = sum(one for one, _ in results) / ranks
    for factor, found in written.items():
        assert found < 1.02 * (1 + factor) * sent_once + headers
        assert found > 2 * sent_once / 1.35  # k uses what was asked for
    assert written[4] > 1.1 * written[1]


@pytest.mark.parametrize(("ranks", "exchange"), [(2, "gather"), (3, "sharded")])
def test_many_ranks_have_owners(monkeypatch: pytest.MonkeyPatch, ranks: int, exchange: str) -> None:
    monkeypatch.setattr(topk_updates, "MOST_GATHERED", 2)

    def program(group: pycomm.Group) -> str:
        model = perceptron()
        local = pycomm.LocalSGD(model, adamw(model), compression=TopK(density=0.2, group=4))
        step_on(model, batch(group.rank, 0), local)
        return str(local.stats()["exchange"])

    assert run_ranks(ranks, program) == [exchange] * ranks


@RANKS
def test_quantized_bytes_on_the_transport(ranks: int) -> None:
    """One bit for each value to the owners, eight from them, and headers of 1 %."""
    count = sum(p.numel() for p in big_model().parameters())
    written = sum(one for one, _ in run_ranks(ranks, written_in_a_step, Quantize(bits=1)))
    assert written / (ranks - 1) < count * (1 + 8) / 8 / 0.97


def test_buckets_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bucket, or one for each parameter: six, so that sums overlap with later buckets."""

    def program(group: pycomm.Group) -> list[Tensor]:
        model = perceptron()
        local = pycomm.LocalSGD(model, adamw(model), compression=FEW_BITS)
        for step in range(3):
            step_on(model, batch(group.rank, step), local)
        return [*parameters(model), *residuals(local)]

    whole = run_ranks(2, program)
    monkeypatch.setattr(quantized_updates, "BUCKET", 1)
    for one, other in zip(whole, run_ranks(2, program), strict=True):
        assert equal(one, other)


@pytest.mark.parametrize("rate", [1.0, 0.7])
@BOTH
def test_an_outer_optimizer(compression: Compression, rate: float) -> None:
    """Rate 1 without momentum is the step without an outer optimizer."""

    def program(group: pycomm.Group, rate: float | None) -> tuple[list[Tensor], list[Tensor]]:
        model = perceptron()
        outer = None
        if rate is not None:
            nesterov = {"momentum": 0.9, "nesterov": True} if rate != 1 else {}
            outer = torch.optim.SGD(model.parameters(), lr=rate, **nesterov)
        local = pycomm.LocalSGD(model, adamw(model), 2, compression=compression, outer=outer)
        for step in range(9):
            step_on(model, batch(group.rank, step), local)
        return parameters(model), residuals(local)

    plain, around = run_ranks(2, program, None), run_ranks(2, program, rate)
    assert equal(around[0][0], around[1][0])
    if rate == 1:
        torch.testing.assert_close(plain[0], around[0], rtol=1e-5, atol=1e-6)
    else:
        assert not equal(plain[0][0], around[0][0])


@BOTH
def test_adaptive_intervals(compression: Compression) -> None:
    def program(group: pycomm.Group) -> list[tuple[int, list[Tensor]]]:
        model = perceptron()
        local = pycomm.AdaptiveLocalSGD(
            model, adamw(model), 4, begin_step=2, compression=compression
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        averaged = []
        for step in range(14):
            local.zero_grad()
            loss = F.mse_loss(model(batch(group.rank, step)[0]), batch(group.rank, step)[1])
            scaler.scale(loss * math.inf if step == group.rank == 1 else loss).backward()
            scaler.step(local, loss)
            scaler.update()
            if local.last_sync == local.step_count:
                averaged.append((local.last_sync, parameters(model)))
        return averaged

    first, second = run_ranks(2, program)
    assert len(first) >= 3
    assert 2 not in [step for step, _ in first]  # rank 1 overflowed, and all skipped
    for (a, x), (b, y) in zip(first, second, strict=True):
        assert a == b
        assert equal(x, y)


@on_ranks(2)
@BOTH
def test_buffers_and_other_layouts(group: pycomm.Group, compression: Compression) -> list[Tensor]:
    """Buffers are averaged; a channels-last weight keeps its memory order."""
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 4 * 4, 2)
    model = seeded(nn.Sequential(*layers[:1], *layers[2:]), 1).to(memory_format=torch.channels_last)
    model.insert(1, layers[1])
    local = pycomm.LocalSGD(model, adamw(model), compression=compression)
    made = torch.Generator().manual_seed(group.rank)
    for _ in range(3):
        local.zero_grad()
        x = torch.randn(4, 3, 6, 6, generator=made)
        model(x).square().mean().backward()
        local.step()
    return [*parameters(model), *(b.clone() for b in model.buffers())]


@on_ranks(2)
@BOTH
def test_memory_of_parameters_may_be_replaced(
    group: pycomm.Group, compression: Compression
) -> list[Tensor]:
    model = perceptron()
    local = pycomm.LocalSGD(model, adamw(model), compression=compression)
    for step in range(4):
        for p in model.parameters():
            p.data = p.data.clone()
        before = parameters(model)
        step_on(model, batch(group.rank, step), local)
        assert not equal(before, parameters(model))
    return parameters(model)


@on_ranks(2)
@pytest.mark.parametrize(
    "compression",
    [
        TopK(density=0.2, group=4, error_feedback=False),
        dataclasses.replace(SHARDED, error_feedback=False),
        Quantize(error_feedback=False),
    ],
    ids=["topk", "topk, sharded", "quantize"],
)
def test_without_error_feedback_the_rest_is_dropped(
    group: pycomm.Group, compression: Compression
) -> None:
    model = perceptron()
    local = pycomm.LocalSGD(model, adamw(model), compression=compression)
    step_on(model, batch(group.rank, 0), local)
    assert not any(bool(e.any()) for e in residuals(local))
