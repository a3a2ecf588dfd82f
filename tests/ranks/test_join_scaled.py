"""A dynamic loss scale under DataParallel.join() with uneven data: ranks keep one model."""

import math
from typing import Any

import pytest
import torch
from dgc_training import memory_of, same_memory, sgd
from on_ranks import on_ranks
from small_models import batch, equal, parameters, perceptron
from torch import Tensor
from torch.nn import functional as F

import pycomm
from pycomm.compress.dgc import compressor_of
from pycomm.errors import Mismatch
from pycomm.testing import run_ranks

BATCHES = ((2, 6), (6, 1))  # of each rank, in two epochs
OVERFLOWS = {(0, 1), (0, 3), (1, 3)}  # epoch and step: on rank 1 - epoch; in the last two, alone

WAYS: dict[str, dict[str, Any] | None] = {
    "no compression": None,
    "dense phase": {"rampup_begin_step": 100},
    "packets": {},
    "dense_masked": {"exchange": "dense_masked"},
    "fused": {"fused": True},
}


def _scaler(scale: float = 256.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_without_data_keep_step(way: str) -> None:
    """Bitwise equal to a run without scale and without the overflowing steps; scales are powers of
    2."""
    options = WAYS[way]

    def program(group: pycomm.Group, scaled: bool) -> list[Tensor]:
        module = perceptron()
        optimizer, scaler = sgd(module, weight_decay=1e-2), _scaler()
        dgc, others = None, [optimizer, scaler]
        if options is not None:
            given = {"sparsity": [0.9], "min_count": 100, **options}
            dgc = pycomm.DGC(optimizer, scaler=scaler if scaled else None, **given)
            others = []
        model = pycomm.DataParallel(module, compression=dgc)
        for epoch, batches in enumerate(BATCHES):
            with model.join(*others):
                for step in range(batches[group.rank]):
                    overflow = (epoch, step) in OVERFLOWS
                    if overflow and not scaled:
                        continue
                    x, y = batch(group.rank, 10 * epoch + step)
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(x), y)
                    if overflow and group.rank == 1 - epoch:
                        loss = loss * math.inf
                    if scaled:
                        scaler.scale(loss).backward()
                        scaler.step(optimizer)
                        scaler.update()
                    else:
                        loss.backward()
                        optimizer.step()
            states = pycomm.all_gather_object(scaler.state_dict())
            assert states[0] == states[1]
            if scaled:  # down twice, up once; up, down, up
                assert states[0]["scale"] == (128.0, 256.0)[epoch]
        memories = [] if dgc is None else compressor_of(dgc).state.memories.values()
        return [*parameters(module), *(m.u.clone() for m in memories if m.v is None)]

    scaled, plain = (run_ranks(2, program, way) for way in (True, False))
    assert equal(*scaled)  # also the velocities of dense parameters
    assert equal(scaled[0], plain[0])


@on_ranks(2)
def test_different_loss_scales_are_reported(group: pycomm.Group) -> None:
    module = perceptron()
    optimizer, scaler = sgd(module), _scaler(128.0 * (1 + group.rank))
    dgc = pycomm.DGC(optimizer, sparsity=[0.9], min_count=100, scaler=scaler)
    model = pycomm.DataParallel(module, compression=dgc)
    before = memory_of(dgc)
    x, y = batch(group.rank, 0)
    with pytest.raises(Mismatch, match=r"from 128\.0 to 256\.0"):
        scaler.scale(F.mse_loss(model(x), y)).backward()
    assert same_memory(before, memory_of(dgc))


def test_static_scale_is_loaded() -> None:
    scaler = pycomm.StaticLossScaler(128.0)
    scaler.load_state_dict(pycomm.StaticLossScaler(64.0).state_dict())
    scaler.scale(torch.ones(1))
    scaler.update()
    assert scaler.get_scale() == 64.0
