"""DGC with fused=True compared with updates by p.grad, bit by bit.

Under torch's DDP: test_dgc_steps.py. With loss scales: test_compression_contract.py.
"""

from typing import Any

import pytest
import torch
from dgc_training import compressed, memory_of, same_memory, sgd
from on_ranks import on_ranks
from small_models import batch, equal, parameters, perceptron, seeded, step_on
from torch import Tensor, nn
from torch.nn import functional as F

import pycomm
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.testing import run_ranks

OPTIONS: list[dict[str, Any]] = [
    {},
    {"select": "model", "clip": "global", "clip_norm": 0.05},
    {"min_count": 100, "masking": False},
    {"rampup_begin_step": 2, "rampup_step": 4, "sparsity": [0.5, 0.9]},  # dense, masked, packets
]


def _grouped(module: nn.Module) -> torch.optim.SGD:
    """Rates that change in the middle of a packet; momentum and decay in two parts of it."""
    groups = [
        {"params": [p], "lr": 0.01 * (1 + i // 2), "weight_decay": 1e-2 * (i % 3 == 0)}
        for i, p in enumerate(module.parameters())
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "default")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    def program(group: pycomm.Group, fused: bool) -> list[Tensor]:
        module = perceptron().to(dtype)
        whole = options.get("select") == "model"
        optimizer = sgd(module, weight_decay=1e-2) if whole else _grouped(module)
        settings = {"sparsity": [0.9], "min_count": 1, **options}
        dgc = pycomm.DGC(optimizer, fused=fused, **settings)
        model = pycomm.DataParallel(module, compression=dgc)
        for step in range(10):
            x, y = batch(group.rank, step)
            for part in optimizer.param_groups:
                part["lr"] *= 0.9  # a change between backward and step takes effect
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            F.mse_loss(model(x.to(dtype)), y.to(dtype)).backward()
            optimizer.param_groups[0]["lr"] *= 1.01
            optimizer.step()
        return [*parameters(module), *(x for pair in memory_of(dgc).values() for x in pair)]

    plain, fused = (run_ranks(3, program, way) for way in (False, True))
    vectors = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    for a, b in zip(plain, fused, strict=True):
        if vectors:  # torch's SGD then uses fma
            assert equal(a, b)
        torch.testing.assert_close(a, b)


def test_skipped_step_is_discarded_with_its_gradient() -> None:
    def program(group: pycomm.Group, fused: bool) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        module = perceptron()
        model, optimizer, dgc = compressed(module, fused=fused)
        for step in range(5):
            optimizer.zero_grad()
            F.mse_loss(model(batch(group.rank, step)[0]), batch(group.rank, step)[1]).backward()
            if step != 2:
                optimizer.step()
        return parameters(module), memory_of(dgc)

    plain, fused = (run_ranks(2, program, way)[0] for way in (False, True))
    torch.testing.assert_close(plain[0], fused[0])
    torch.testing.assert_close(plain[1], fused[1])


@pytest.mark.parametrize("fused", [False, True])
def test_zero_grad_before_step_discards_the_received_gradient(fused: bool) -> None:
    """A model of which one rank uses a half whose gradient does not exist on the other rank."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (seeded(nn.Linear(16, 4), seed) for seed in (1, 2))

        def forward(self, x: Tensor, both: bool) -> Tensor:
            return self.one(x) + self.other(x) if both else self.one(x)

    def program(group: pycomm.Group) -> tuple[list[bool], list[Tensor]]:
        module = Halves()
        optimizer = sgd(module)
        dgc = pycomm.DGC(optimizer, sparsity=[0.5], min_count=1, fused=fused)
        model = pycomm.DataParallel(module, compression=dgc, find_unused_parameters=True)
        unchanged = []
        for step in range(3):
            optimizer.zero_grad()
            model(batch(group.rank, step)[0], group.rank == 0).square().sum().backward()
            before = parameters(module)
            if step == 1:
                optimizer.zero_grad()
            optimizer.step()
            unchanged.append(equal(before, parameters(module)))
        return unchanged, parameters(module)

    (unchanged, mine), (also, other) = run_ranks(2, program)
    assert unchanged == also == [False, True, False]
    assert equal(mine, other)


@pytest.mark.parametrize("fused", [False, True])
def test_a_state_that_is_loaded_between_backward_and_step(fused: bool) -> None:
    """step() changes nothing then, and the next steps continue from the state."""

    def program(group: pycomm.Group, stray: bool) -> list[Tensor]:
        module = perceptron()
        model, optimizer, dgc = compressed(module, fused=fused, min_count=100)
        for step in range(3):
            step_on(model, batch(group.rank, step), optimizer)
        saved = dgc.state_dict()
        if stray:
            weights = parameters(module)
            optimizer.zero_grad()
            F.mse_loss(model(batch(group.rank, 7)[0]), batch(group.rank, 7)[1]).backward()
            dgc.load_state_dict(saved)
            optimizer.step()
            assert equal(weights, parameters(module))
        for step in range(3, 6):
            step_on(model, batch(group.rank, step), optimizer)
        return [*parameters(module), *(x for pair in memory_of(dgc).values() for x in pair)]

    without_stray, stray = (run_ranks(2, program, stray) for stray in (False, True))
    assert equal(without_stray[0], stray[0])
    assert equal(without_stray[1], stray[1])


@pytest.mark.parametrize("fused", [False, True])
def test_detach_waits_for_the_step(fused: bool) -> None:
    """It is rejected on all ranks, changes nothing, and is allowed after step(), zero_grad() of
    either kind and a join() in which one rank had no more data."""

    def program(group: pycomm.Group, end: str) -> list[Tensor]:
        module = perceptron()
        model, optimizer, dgc = compressed(module, fused=fused, min_count=100)
        with model.join():
            for step in range(4 if end != "join" else 4 + group.rank):
                optimizer.zero_grad()
                F.mse_loss(model(batch(group.rank, step)[0]), batch(group.rank, step)[1]).backward()
                if step == 3:
                    before = memory_of(dgc)
                    with pytest.raises(InvalidArgument, match=r"between backward\(\) and"):
                        dgc.detach()
                    assert same_memory(before, memory_of(dgc))
                if step == 3 and "zero_grad" in end:
                    optimizer.zero_grad(set_to_none=end == "zero_grad")
                else:
                    optimizer.step()
        dgc.detach()
        weights = parameters(module)
        optimizer.step()  # no earlier gradient remains, on any rank
        assert equal(weights, parameters(module))
        del model
        step_on(pycomm.DataParallel(module), batch(group.rank, 5), optimizer)
        return parameters(module)

    for end in ("step", "zero_grad", "zero_grad in place", "join"):
        assert equal(*run_ranks(2, program, end))


@on_ranks(1)
def test_rejected_arguments(group: pycomm.Group) -> None:
    module = perceptron()
    refused: list[dict[str, Any]] = [
        {"momentum_correction": False},
        {"decay_correction": False},
    ]
    for wrong in refused:
        with pytest.raises(InvalidArgument, match="requires momentum_correction"):
            compressed(module, fused=True, **wrong)
    model, optimizer, _ = compressed(module, fused=True)
    step_on(model, batch(0, 0), torch.optim.SGD(module.parameters(), lr=0.0))
    with pytest.raises(Unsupported, match="without a closure"):
        optimizer.step(lambda: 1.0)
    optimizer.step()
