"""DGC with lean packets: what it must have for every kind of values, and the bytes that it sends.

Ranks are threads. Scales, faults, torch's DDP: test_dgc_steps.py. The packets: test_lean.py.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from little_models import batch, equal, parameters, perceptron, step_on
from test_dgc_steps import compressed, memory_of, sgd
from torch import Tensor, nn

import pycomm
from pycomm.compress.schedule import VALUE_DTYPES, index_bits, packet_bytes
from pycomm.errors import Unsupported
from pycomm.testing import run_ranks

FORMS = [("gather", value_dtype) for value_dtype in VALUE_DTYPES]


def trained(
    group: pycomm.Group,
    options: dict[str, Any],
    form: dict[str, Any] | None = None,
    stop: int | None = None,
) -> list[Tensor]:
    """The parameters after 6 steps and this rank's u and v; from `stop` on with a new model, into
    which the states go."""
    settings = {"nesterov": True, "exchange": "gather", **options}
    module = perceptron()
    model, optimizer, dgc = compressed(module, form, **settings)
    for step in range(6):
        if step == stop:
            saved = [x.state_dict() for x in (module, optimizer, dgc)]
            module = perceptron(2)
            model, optimizer, dgc = compressed(module, form, **settings)
            for one, state in zip((module, optimizer, dgc), saved, strict=True):
                one.load_state_dict(state)
        step_on(model, batch(group.rank, step), optimizer)
    return [*parameters(module), *(x for pair in memory_of(dgc).values() for x in pair)]


def same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(equal(*pair) for pair in zip(a, b, strict=True))


@pytest.mark.parametrize("select", ["parameter", "model"])
def test_without_rounding_the_codec_changes_no_bit(select: str) -> None:
    raw, lean = (
        run_ranks(3, trained, {"codec": codec, "select": select}) for codec in ("raw", "lean")
    )
    assert same(raw, lean)


@pytest.mark.parametrize(("exchange", "value_dtype"), FORMS)
def test_buckets_fusion_and_a_resume_change_no_bit(exchange: str, value_dtype: str) -> None:
    """P5, P7, P8."""
    options = {"exchange": exchange, "value_dtype": value_dtype, "codec": "lean"}
    results = run_ranks(3, trained, options)
    count = len(parameters(perceptron()))
    assert all(equal(one[:count], results[0][:count]) for one in results)
    assert not equal(results[0][count:], results[1][count:])
    assert same(results, run_ranks(3, trained, options, {"bucket_mb": 1e-5, "lanes": 2}))
    assert same(results, run_ranks(3, trained, options, None, 3))
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):  # torch's SGD then uses fma
        assert same(results, run_ranks(3, trained, {**options, "fused": True}))


def owed(group: pycomm.Group, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Momentum 0, rate 1, so that all gradients are what was sent and what is owed: weights, and
    the sums over ranks of gradients and of what is owed."""
    layer = nn.Linear(3000, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = sgd(layer, momentum=0.0, lr=1.0)
    dgc = pycomm.DGC(optimizer, sparsity=[0.9], min_count=1, **options)
    model = pycomm.DataParallel(layer, compression=dgc)
    own = torch.Generator().manual_seed(group.rank)
    total = torch.zeros(3000, dtype=torch.float64)
    for _ in range(12):
        gradient = torch.randn(1, 3000, generator=own).exp() - 1.5
        total += gradient[0]
        optimizer.zero_grad()
        model(gradient).sum().backward()
        optimizer.step()
    (memory,) = dgc.memories.values()
    assert memory.v is not None
    here = memory.v.double()
    assert bool(here[memory.v != 0].any())
    return layer.weight.detach()[0], pycomm.all_reduce(total), pycomm.all_reduce(here)


@pytest.mark.parametrize(("exchange", "value_dtype"), FORMS)
def test_nothing_is_lost(exchange: str, value_dtype: str) -> None:
    """P3: sent + owed = gradients, to rounding."""
    options = {"exchange": exchange, "value_dtype": value_dtype, "codec": "lean"}
    ranks = 4
    results = run_ranks(ranks, owed, options)
    weight, total, missing = results[0]
    assert all(torch.equal(weight, other) for other, _, _ in results)
    sent = -weight.double() * ranks
    assert float((sent + missing - total).abs().max()) <= 1e-5 * float(total.abs().max())
    assert float(sent.abs().sum()) > 0.5 * float(total.abs().sum())  # most has arrived


@pytest.mark.parametrize(("exchange", "value_dtype"), FORMS)
def test_nan_and_inf_do_not_stay(exchange: str, value_dtype: str) -> None:
    def program(group: pycomm.Group) -> Tensor:
        layer = nn.Linear(50, 1, bias=False)
        nn.init.zeros_(layer.weight)
        options = {"exchange": exchange, "value_dtype": value_dtype, "codec": "lean"}
        model, optimizer, dgc = compressed(layer, **options)
        for step in range(3):
            gradient = torch.arange(1.0, 51.0)[None] * 100
            if step == 1 and group.rank == 1:
                gradient[0, 7], gradient[0, 9] = math.nan, -math.inf
            optimizer.zero_grad()
            model(gradient).sum().backward()
            optimizer.step()
            ((u, v),) = memory_of(dgc).values()
            assert bool(u.isfinite().all())
            assert bool(v.isfinite().all())
        return layer.weight.detach()[0]

    for weight in run_ranks(2, program):
        assert not bool(weight[[7, 9]].isfinite().any())


def moved(group: pycomm.Group, count: int, options: dict[str, Any]) -> tuple[int, int, int, int]:
    """Of one step: bytes that the transport has written and received, what stats() says was sent,
    and k. Gradients are drawn evenly: no index set is harder to code."""
    layer = nn.Linear(count, 1, bias=False)
    optimizer = sgd(layer)
    dgc = pycomm.DGC(optimizer, **options)
    model = pycomm.DataParallel(layer, compression=dgc)
    own = torch.Generator().manual_seed(group.rank)
    model(torch.randn(1, count, generator=own)).sum().backward()  # this and no other plans
    before = group.stats()
    model(torch.randn(1, count, generator=own)).sum().backward()
    after = group.stats()
    written = after.bytes_written - before.bytes_written
    received = after.bytes_received - before.bytes_received
    said = dgc.stats()
    return written, received, said["sent_bytes"], said["k"]


WANTED = {"float32": 5.47, "bfloat16": 3.47, "int8": 2.49, "2bit": 1.72, "1bit": 1.60}


@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
def test_bytes_of_an_element(value_dtype: str) -> None:
    """A thousandth of 4 M; headers and lengths are counted."""
    count = 1 << 22
    options = {"value_dtype": value_dtype, "exchange": "gather", "codec": "lean"}
    for written, _, said, k in run_ranks(2, moved, count, options):
        assert k == round(count / 1000)
        assert said <= written <= said + 200  # frames
        assert written <= WANTED[value_dtype] * k
        guess = packet_bytes([k], [count], 4, value_dtype)
        assert abs(said - guess) <= 0.01 * guess


def test_the_guess_of_an_index() -> None:
    """Beside the entropy of a choice: above it, by no more than a Rice code takes."""
    for density in (0.25, 1 / 64, 1e-3, 1e-4):
        chosen, rest = density, 1 - density
        entropy = (-chosen * math.log2(chosen) - rest * math.log2(rest)) / density
        assert entropy < index_bits(density) < 1.03 * entropy
    assert index_bits(1.0) == 1.0


def test_auto_counts_coded_bytes() -> None:
    """From four ranks on three quarters are too little for raw packets; not so for coded ones."""

    def program(group: pycomm.Group, options: dict[str, Any]) -> str:
        module = nn.Linear(100, 100)
        model, optimizer, dgc = compressed(
            module, sparsity=[0.75], exchange="auto", min_count=1000, **options
        )
        optimizer.zero_grad()
        model(torch.randn(4, 100)).square().mean().backward()
        return str(dgc.stats()["exchange"])

    found = {
        (ranks, value_dtype): run_ranks(ranks, program, {"value_dtype": value_dtype})
        for ranks, value_dtype in itertools.product((4, 6), ("float32", "2bit"))
    }
    assert {key: set(said) for key, said in found.items()} == {
        (4, "float32"): {"masked"},
        (4, "2bit"): {"gather"},
        (6, "float32"): {"masked"},
        (6, "2bit"): {"gather"},
    }


def test_parameters_elsewhere_are_refused() -> None:
    optimizer = sgd(nn.Linear(200, 200, device="meta"))
    with pytest.raises(Unsupported, match=r"lies on meta.*codec"):
        pycomm.DGC(optimizer, value_dtype="2bit")
