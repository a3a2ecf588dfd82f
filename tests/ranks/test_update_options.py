"""LocalSGD with TopK and Quantize: refused arguments, warnings and convergence."""

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from small_models import batch, parameters, perceptron, step_on
from torch import Tensor
from torch.nn import functional as F
from update_training import SMALL, Compression, adamw, big_model, sgd

import pycomm
from pycomm import Quantize, TopK
from pycomm.compress.topk_updates import TopKUpdates
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.testing import run_ranks


@on_ranks(1)
def test_bad_arguments(group: pycomm.Group) -> None:
    model = perceptron()
    for wrong in ({"rule": "torch"}, {"momentum": "averaged"}, {"clip_norm": 0.0}):
        with pytest.raises(InvalidArgument):
            pycomm.LocalSGD(model, sgd(model), compression=SMALL, **wrong)
    with pytest.raises(InvalidArgument, match=r"invalid ratio: got 200.0, expected at most"):
        pycomm.LocalSGD(model, adamw(model), compression=TopK())
    for other, message in (
        (perceptron().double(), "float64"),
        (perceptron().to("meta"), "is on meta"),
    ):
        with pytest.raises(Unsupported, match=message):
            TopKUpdates(SMALL, list(other.parameters()), parameters(other), group)
    with pytest.raises(InvalidArgument, match=r"expected pycomm.TopK\(\) or"):
        pycomm.LocalSGD(model, adamw(model), compression="1bit")
    with pytest.raises(InvalidArgument, match="no parameters"):
        TopKUpdates(SMALL, [], [], group)


@pytest.mark.parametrize(
    ("make", "compression", "warned"),
    [
        (lambda m: adamw(m, betas=(0.9, 0.99)), TopK(ratio=50), "AdamW with betas\\[0\\]=0.9"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9), TopK(ratio=50), "SGD"),
        (adamw, TopK(ratio=50), None),
        (lambda m: adamw(m, betas=(0.5, 0.99)), TopK(ratio=50), None),
        (lambda m: adamw(m, betas=(0.9, 0.99)), TopK(density=1, value_dtype="2bit"), None),
        (lambda m: adamw(m, betas=(0.9, 0.99)), Quantize(bits=1), "AdamW with betas\\[0\\]=0.9"),
        (lambda m: adamw(m, betas=(0.9, 0.99)), Quantize(), None),
    ],
)
def test_a_first_moment_is_warned_about(
    make: Any, compression: Compression, warned: str | None
) -> None:
    def program(group: pycomm.Group) -> None:
        model = big_model()
        pycomm.LocalSGD(model, make(model), compression=compression)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_ranks(1, program)
    texts = [str(one.message) for one in found if "residual already" in str(one.message)]
    assert len(texts) == (warned is not None)
    if warned is not None:
        assert texts[0].startswith(warned.replace("\\", ""))


def test_convergence_is_near_that_of_dense_adamw() -> None:
    """A teacher's regression on 2 ranks, 200 times fewer bytes, or one bit for each value. Without
    error feedback both fail. It takes 11 s, as it trains three models until they converge."""

    def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
        x = batch(rank, step, 32)[0]
        with torch.no_grad():
            return x, perceptron(7)(x) * 3

    def program(group: pycomm.Group, compression: Compression | None) -> float:
        model = big_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.004, betas=(0.0, 0.99))
        local = pycomm.LocalSGD(model, optimizer, begin_step=1000, compression=compression)
        for step in range(120):
            optimizer.param_groups[0]["lr"] = 0.004 * (1 - step / 120)
            step_on(model, data(group.rank, step), local)
        x, y = data(0, 999)
        with torch.no_grad():
            return float(F.mse_loss(model(x), y) / y.square().mean())

    dense = run_ranks(2, program, None)[0]
    assert dense < 0.01
    for compression in (TopK(ratio=200), Quantize(bits=1)):
        dropping = dataclasses.replace(compression, error_feedback=False)
        assert run_ranks(2, program, compression)[0] < 1.2 * dense
        assert run_ranks(2, program, dropping)[0] > 1.2 * dense
