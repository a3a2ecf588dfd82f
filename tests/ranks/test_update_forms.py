"""LocalSGD with compression and the forms of torch's optimizers and models: foreach, fused,
capturable (which torch has on the CPU with fused only), compiled, with autocast, with bfloat16
parameters and float32 ones for the optimizer, and with accumulated gradients. Ranks are processes,
as torch.compile is not made for threads.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import batch, equal, parameters, perceptron
from torch import Tensor
from torch.nn import functional as F
from torch_ranks import Run, run_fixture  # noqa: F401 - a fixture
from update_training import EXACT, FEW_BITS, SMALL, Compression, adamw

import pycomm


def _trained(form: str, compression: Compression) -> list[Tensor]:
    """Parameters after three steps of two backward passes each."""
    model = perceptron()
    options = {name: True for name in form.split("+") if name in ("foreach", "fused", "capturable")}
    optimizer = adamw(model, **options)
    local = pycomm.LocalSGD(model, optimizer, compression=compression)
    forward: Any = model
    rounded = perceptron().bfloat16()
    if form == "master":
        forward = rounded
    if form == "compiled":
        forward = torch.compile(model, backend="aot_eager")
        optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]  # as users do
    for step in range(3):
        local.zero_grad()
        for part in range(2):
            x, y = batch(dist.get_rank(), 2 * step + part)
            with torch.autocast("cpu", enabled=form == "autocast"):
                output = forward(x.bfloat16() if form == "master" else x)
            (F.mse_loss(output.float(), y) / 2).backward()
        assert local.step_count == step
        pairs = list(zip(rounded.parameters(), model.parameters(), strict=True))
        for low, p in pairs if form == "master" else ():
            assert low.grad is not None
            p.grad, low.grad = low.grad.float(), None
        local.step()
        for low, p in pairs:
            low.data.copy_(p)
    return parameters(model)


FORMS = ["foreach", "fused", "fused+capturable", "compiled", "autocast", "master"]


@pytest.mark.parametrize("form", FORMS)
def test_forms_train_as_the_plain_one(run: Run, form: str) -> None:
    """Exact values are close to those of the plain form: 1 bit would turn roundings into signs."""
    first, second = run(2, _trained, form, EXACT)
    assert equal(first, second)
    tolerance = 2e-2 if form in ("autocast", "master") else 1e-5
    for got, wanted in zip(first, run(2, _trained, "plain", EXACT)[0], strict=True):
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=0)
        assert float((got - wanted).abs().mean()) < 5e-4  # a step moves most elements by 1e-2
    for compression in (SMALL, FEW_BITS):
        assert equal(*run(2, _trained, form, compression))
