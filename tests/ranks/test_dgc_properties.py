"""P1 to P8 of DGC with 2 to 4 processes and with 64 ranks as threads.

The program of each rank is a function that processes can import. test_dgc.py tests each property in
detail, with few ranks.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import alone, batch, equal, parameters, perceptron, step_on
from test_dgc import (
    EVERYTHING,
    RATE,
    agrees,
    beside_the_second_model,
    double,
    far,
    residuals,
    sgd,
    train,
)
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import Run, run_fixture  # noqa: F401 - pytest finds the fixtures by name

import pycomm
from pycomm.compress.dgc import compressor_of
from pycomm.testing import run_ranks

THREADS = 64
Everyone = tuple[int, Callable[..., list[Any]]]


def _in_process(program: Callable[..., Any], *args: Any) -> Any:
    return program(pycomm.init(), *args)


@pytest.fixture(params=[2, 3, 4, THREADS], ids=lambda n: f"{n}{' threads' * (n == THREADS)}")
def run_on_all(request: pytest.FixtureRequest, run: Run) -> Everyone:
    """The number of ranks, and a function that calls program(group, *args) on each: results by
    rank."""
    size: int = request.param
    if size == THREADS:
        return size, lambda program, *args: run_ranks(size, program, *args, timeout_s=300)
    return size, functools.partial(run, size, _in_process)


def _trained(group: pycomm.Group, steps: int, *settings: dict[str, Any]) -> list[Tensor]:
    return train(group, double(), steps, *settings)[0][-1]


def _same_on_all(results: list[list[Tensor]]) -> list[Tensor]:
    assert all(equal(result, results[0]) for result in results)
    return results[0]


def test_p1_all_sent_without_masking(run_on_all: Everyone) -> None:
    ranks, run_all = run_on_all
    optimizer = {"nesterov": True, "weight_decay": 1e-2}
    got = _same_on_all(run_all(_trained, 5, {"sparsity": [0.0], "masking": False}, optimizer))
    assert (
        far(got, alone(double(), 5, ranks, lambda m: sgd(m, **optimizer), torch.float64)) <= 4e-15
    )


def test_p2_all_sent_with_masking(run_on_all: Everyone) -> None:
    ranks, run_all = run_on_all
    got = _same_on_all(run_all(_trained, 4, {"sparsity": [0.0]}, {"nesterov": True}))
    plain = {"momentum": 0.0, "lr": RATE * 1.9}
    assert far(got, alone(double(), 4, ranks, lambda m: sgd(m, **plain), torch.float64)) <= 4e-15


def test_p3_the_residual(run_on_all: Everyone) -> None:
    _, run_all = run_on_all
    weights = run_all(residuals, 4, True, True, 0.5)
    assert all(torch.equal(weight, weights[0]) for weight in weights)


def test_p4_p5_the_second_model(run_on_all: Everyone) -> None:
    ranks, run_all = run_on_all
    given: tuple[bool, float, dict[str, Any]] = True, 0.05, {}
    agrees(run_all(beside_the_second_model, 2 if ranks == THREADS else 4, *given), *given)


def _dense_beside_plain(group: pycomm.Group, ddp: bool) -> list[list[Tensor]]:
    optimizer = {"nesterov": True, "weight_decay": 1e-2}
    found = [train(group, perceptron(), 3, {"rampup_begin_step": 3}, optimizer)[0][-1]]
    module = perceptron()
    model = DistributedDataParallel(module) if ddp else pycomm.DataParallel(module)
    theirs = sgd(module, **optimizer)
    for step in range(3):
        step_on(model, batch(group.rank, step), theirs)
    return [*found, parameters(module)]


def test_p6_dense_before_the_ramp(run_on_all: Everyone) -> None:
    """Compared with torch's DDP, which divides before the sum: equal bits where that is exact."""
    ranks, run_all = run_on_all
    for dense, plain in run_all(_dense_beside_plain, ranks != THREADS):
        if ranks != 3:
            assert equal(dense, plain)
        torch.testing.assert_close(dense, plain, rtol=1e-6, atol=1e-7)


def _resumed(group: pycomm.Group, stop: int | None) -> list[Tensor]:
    """Dense, then two levels; its state is loaded into a new model at `stop`."""
    ramp: dict[str, Any] = {"rampup_begin_step": 1, "rampup_step": 2, "sparsity": [0.5, 0.9]}

    def made(seed: int) -> tuple[Any, ...]:
        module = perceptron(seed)
        optimizer = sgd(module, nesterov=True)
        dgc = pycomm.DGC(optimizer, **{**EVERYTHING, **ramp})
        return module, optimizer, dgc, pycomm.DataParallel(module, compression=dgc)

    module, optimizer, dgc, model = made(1)
    for step in range(4):
        if step == stop:
            saved = [x.state_dict() for x in (module, optimizer, dgc)]
            module, optimizer, dgc, model = made(2)
            for one, state in zip((module, optimizer, dgc), saved, strict=True):
                one.load_state_dict(state)
        step_on(model, batch(group.rank, step), optimizer)
    memories = compressor_of(dgc).state.memories.values()
    return [*parameters(module), *(x for memory in memories for x in memory.tensors)]


def test_p7_resume(run_on_all: Everyone) -> None:
    _, run_all = run_on_all
    whole = run_all(_resumed, None)
    for stop in (1, 2):
        assert all(equal(*pair) for pair in zip(whole, run_all(_resumed, stop), strict=True))


def test_p8_buckets_and_lanes(run_on_all: Everyone) -> None:
    _, run_all = run_on_all
    forms: list[dict[str, Any]] = [{}, {"bucket_mb": 1e-5, "lanes": 2}]
    results = [_same_on_all(run_all(_trained, 3, {"sparsity": [0.95]}, {}, form)) for form in forms]
    assert equal(*results)
