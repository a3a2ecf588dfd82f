"""Helpers of the tests of LocalSGD with compressed updates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import batch, equal, parameters, seeded, step_on
from torch import Tensor, nn

import pycomm
from pycomm._quantize import blocks_of, own_places
from pycomm.compress.topk_updates import TopKUpdates
from pycomm.compress.update_unit import places_of
from pycomm.errors import Error
from pycomm.testing import run_ranks

Compression = pycomm.TopK | pycomm.Quantize
SMALL = pycomm.TopK(density=0.2, group=4)
SHARDED = pycomm.TopK(density=0.2, group=4, exchange="sharded")
FEW_BITS = pycomm.Quantize(bits=2, down_bits=4)
EXACT = pycomm.TopK(density=1, value_dtype="float32")
BOTH = pytest.mark.parametrize(
    "compression", [SMALL, SHARDED, FEW_BITS], ids=["topk", "topk, sharded", "quantize"]
)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    given = {"lr": 0.01, "betas": (0.0, 0.99), "weight_decay": 0.1, **options}
    return torch.optim.AdamW(model.parameters(), **given)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.4, weight_decay=1e-3)


def big_model() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(16, 400), nn.Tanh(), nn.Linear(400, 300), nn.Tanh(),
                                nn.Linear(300, 3)), 1)  # fmt: skip


def residuals(local: pycomm.LocalSGD) -> list[Tensor]:
    """What this rank has not sent, as a sender and as an owner of blocks."""
    return residuals_of(local.state_dict(), isinstance(local._compressor, TopKUpdates))


def residuals_of(state: dict[str, Any], topk: bool = False) -> list[Tensor]:
    found = [x.clone() for x in state["residual"]]
    where = state["rank"], state["size"]
    if topk:  # an owner has a shard of the parameters
        counts, whole = [len(x) for x in found], torch.cat(found)
        for owned in state.get("owner_residual", ()):
            whole[places_of(counts, *where)] += owned
        return list(torch.split(whole, counts))
    first = 0
    for x, owned in zip(found, state.get("owner_residual", ()), strict=False):
        if len(owned):
            x[own_places(len(x), first, *where)] += owned
        first += blocks_of(len(x))
    return found


def fail_in_step(
    group: pycomm.Group, model: nn.Module, local: pycomm.LocalSGD, step: int
) -> list[Tensor]:
    """A step in which rank 0 leaves: it raises, and the parameters stay. Returns them."""
    before = parameters(model)
    pycomm.barrier()
    if group.rank == 0:
        group.abort("a rank is lost")
    with pytest.raises(Error):
        step_on(model, batch(group.rank, step), local)  # type: ignore[arg-type]  # has its methods
    assert equal(before, parameters(model))
    return before


def check_failed(program: Callable[[pycomm.Group], None]) -> None:
    """Runs two ranks that use fail_in_step(); one of them at least ends without an error."""
    results = run_ranks(2, program, return_exceptions=True)
    assert all(isinstance(result, (Error, type(None))) for result in results), results
    assert None in results
