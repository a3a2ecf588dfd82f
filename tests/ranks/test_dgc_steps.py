"""Unusual steps of DGC: values that are not finite, or with ranks that do not take part.

Also the same bits under torch's DDP. The properties of ordinary steps are in test_dgc.py; failing
and skipped steps in test_compression_contract.py.
"""

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dgc_training import RATE, compressed, memory_of, same_memory, sgd
from on_ranks import on_ranks
from small_models import batch, equal, parameters, perceptron, seeded, step_on
from test_dgc_compact import FORMS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import Run, in_processes, run_fixture  # noqa: F401 - a fixture

import pycomm
from pycomm.compress.dgc import compressor_of
from pycomm.errors import InvalidArgument, Mismatch, Unsupported
from pycomm.testing import run_ranks

OPTIONS: list[dict[str, Any]] = [
    {},
    {"rampup_begin_step": 3, "sparsity": [0.5, 0.75, 0.9], "rampup_step": 4},
    {"select": "model", "decay_correction": False},
    {"clip": "global", "clip_norm": 0.05},
    {"clip_norm": 0.05, "min_count": 100},
    {"exchange": "dense_masked", "min_count": 100},
    {"fused": True, "min_count": 100},
    {"fused": True, "exchange": "dense_masked"},
    {"value_dtype": "1bit", "exchange": "gather", "select": "model", "fused": True},
    {"value_dtype": "2bit", "exchange": "sharded", "min_count": 100},
]


@in_processes(2)
def test_torch_ddp_gives_the_same_bits() -> None:
    for options in OPTIONS:
        _the_same_under_both(options)


def _the_same_under_both(options: dict[str, Any]) -> None:
    """Small buckets, which torch rebuilds after its first step."""
    found = []
    for ours in (True, False):
        module = perceptron()
        optimizer = sgd(module, nesterov=True, weight_decay=1e-2)
        dgc = pycomm.DGC(optimizer, **{"sparsity": [0.9], "min_count": 1, **options})
        model: nn.Module
        if ours:
            model = pycomm.DataParallel(module, compression=dgc, bucket_mb=1e-3)
        else:
            model = DistributedDataParallel(module, bucket_cap_mb=1e-3)
            model.register_comm_hook(dgc, pycomm.dgc_hook)
        for step in range(8):
            step_on(model, batch(torch.distributed.get_rank(), step), optimizer)
        memories = compressor_of(dgc).state.memories.values()
        found.append([*parameters(module), *(x for m in memories for x in (m.u, m.v))])
    assert equal(*([x for x in one if x is not None] for one in found)), options


SCALERS: dict[str, Callable[[], torch.amp.GradScaler]] = {
    "static": lambda: pycomm.StaticLossScaler(256.0),
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3),
}


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "default")
def test_a_loss_scale_skips_a_step_on_all_ranks(scaler: str, options: dict[str, Any]) -> None:
    """Rank 1 overflows in steps 2 and 5; a run without them and without scale has the same bits."""

    def program(group: pycomm.Group, scaled: bool) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        module = perceptron()
        scale = SCALERS[scaler]() if scaled else None
        model, optimizer, dgc = compressed(module, scaler=scale, weight_decay=1e-2, **options)
        for step in range(9):
            overflow = step in (2, 5)
            if overflow and not scaled:
                continue
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch(group.rank, step)[0]), batch(group.rank, step)[1])
            if not scaled:
                loss.backward()
                optimizer.step()
                continue
            assert scale is not None
            before, weights, rate = memory_of(dgc), parameters(module), scale.get_scale()
            count = dgc.stats()["step"]
            if overflow and group.rank == 1:
                loss = loss * (math.inf if step == 2 else math.nan)
            scale.scale(loss).backward()
            if step == 3:
                scale.unscale_(optimizer)
            scale.step(optimizer)
            scale.update()
            assert dgc.stats()["step"] == count + (not overflow)
            assert equal(weights, parameters(module)) == overflow
            assert same_memory(before, memory_of(dgc)) == overflow
            if overflow and scaler == "torch":
                assert scale.get_scale() == rate / 2
        return parameters(module), memory_of(dgc)

    with_scale, without = (run_ranks(2, program, scaled) for scaled in (True, False))
    assert equal(with_scale[0][0], with_scale[1][0])
    assert equal(with_scale[0][0], without[0][0])
    for a, b in zip(with_scale, without, strict=True):
        assert same_memory(a[1], b[1])


@on_ranks(2)
def test_different_loss_scales_are_reported(group: pycomm.Group) -> None:
    module = perceptron()
    optimizer, scaler = sgd(module), torch.amp.GradScaler("cpu", 128.0 * (1 + group.rank))
    dgc = pycomm.DGC(optimizer, sparsity=[0.9], min_count=100, scaler=scaler)
    model = pycomm.DataParallel(module, compression=dgc)
    before = memory_of(dgc)
    x, y = batch(group.rank, 0)
    with pytest.raises(Mismatch, match=r"from 128\.0 to 256\.0"):
        scaler.scale(F.mse_loss(model(x), y)).backward()
    assert same_memory(before, memory_of(dgc))


def _uneven(group: pycomm.Group, decay: float, options: dict[str, Any], ddp: bool) -> Tensor:
    """Momentum 0, so that sent values and residuals sum to all gradients. Integers."""
    layer = nn.Linear(60, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = sgd(layer, momentum=0.0, lr=1.0, weight_decay=decay)
    dgc = pycomm.DGC(optimizer, **{"sparsity": [0.9], "min_count": 1, **options})
    model: Any = layer
    if ddp:
        model = DistributedDataParallel(layer)
        model.register_comm_hook(dgc, pycomm.dgc_hook)
    else:
        model = pycomm.DataParallel(layer, compression=dgc)
    own = torch.Generator().manual_seed(group.rank)
    total = torch.zeros(60)
    with model.join():
        for _ in range((2, 7)[group.rank]):
            gradient = torch.randint(-8, 9, (1, 60), generator=own).float() * 64
            total += gradient[0] + decay * layer.weight.detach()[0]
            optimizer.zero_grad()
            model(gradient).sum().backward()
            optimizer.step()
    assert dgc.stats()["step"] == 7
    residual = next(iter(compressor_of(dgc).state.memories.values())).v
    missing = pycomm.all_reduce(total) - pycomm.all_reduce(residual.clone())
    assert torch.equal(-layer.weight.detach()[0] * group.size, missing)
    return layer.weight.detach()


COMPACT = {"codec": "compact"}


@pytest.mark.parametrize("options", [COMPACT, {}, {"select": "model"}, {"rampup_begin_step": 2}])
def test_a_rank_without_data_sends_its_residual(options: dict[str, Any]) -> None:
    """Neither gradient nor decay: its weights differ from those of the others until the end."""
    for decay in (0.0, 0.5) if "rampup_begin_step" not in options else (0.0,):
        assert torch.equal(*run_ranks(2, _uneven, decay, options, False))


def _uneven_under_ddp() -> Tensor:
    return _uneven(pycomm.init(), 0.0, {}, True)


def test_rank_without_data_sends_its_residual_under_torch_join(run: Run) -> None:
    assert torch.equal(*run(2, _uneven_under_ddp))


CLIPS: list[dict[str, Any]] = [{}, {"clip_norm": 1.0}, {"clip_norm": 1.0, "clip": "global"}]
NOT_FINITE = [
    {"masking": masking, "exchange": exchange, **clip}
    for masking in (True, False)
    for exchange in ("gather", "dense_masked")
    for clip in CLIPS
]
NOT_FINITE += [
    {"exchange": exchange, "value_dtype": dtype, "codec": "compact"} for exchange, dtype in FORMS
]


@on_ranks(2)
@pytest.mark.parametrize("options", NOT_FINITE, ids=str)
def test_nan_and_inf_are_sent_immediately_and_leave_the_residual(
    group: pycomm.Group, options: dict[str, Any]
) -> None:
    """A norm that is not finite does not clip: one NaN must not spread to other elements."""
    layer = nn.Linear(50, 1, bias=False)
    nn.init.zeros_(layer.weight)
    model, optimizer, dgc = compressed(layer, **options)
    for step in range(3):
        gradient = torch.arange(1.0, 51.0)[None] * 100
        if step == 1 and group.rank == 1:
            gradient[0, 7], gradient[0, 9] = math.nan, -math.inf
        optimizer.zero_grad()
        model(gradient).sum().backward()
        optimizer.step()
        for found in memory_of(dgc).values():
            assert all(bool(x.isfinite().all()) for x in found)
    weight = layer.weight.detach()[0]
    sent = (~weight.isfinite()).nonzero().flatten().tolist()
    assert sent == [7, 9] or ("codec" in options and {7, 9} <= {*sent})


def test_channels_last_and_half_precision() -> None:
    class Picture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picture = nn.Conv2d(2, 6, 2).to(memory_format=torch.channels_last)
            self.last = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.picture(x.view(-1, 2, 2, 4)).mean((2, 3)))

    def program(group: pycomm.Group, dtype: torch.dtype, last: bool) -> list[Tensor]:
        module = seeded(Picture(), 0)
        if not last:
            module.picture.weight.data = module.picture.weight.data.contiguous()
        module = module.to(dtype)
        model, optimizer, _ = compressed(module, sparsity=[0.5])
        for step in range(6):
            x, y = batch(group.rank, step)
            step_on(model, (x.to(dtype), y.to(dtype)), optimizer)
        return parameters(module)

    for dtype in (torch.float64, torch.bfloat16):
        last, plain = run_ranks(2, program, dtype, True), run_ranks(2, program, dtype, False)
        assert equal(*last)
        assert last[0][0].dtype == dtype
        if dtype == torch.float64:
            torch.testing.assert_close(last[0], plain[0])


@on_ranks(1)
def test_memory_per_parameter(group: pycomm.Group) -> None:
    """Besides parameters and gradients: u and v, 8 bytes a parameter, and at most 3 % of that.

    Counts all tensors that exist after a step and did not before DGC was created. Packets exist
    within a step: 8 bytes of each thousandth element, of all ranks.
    """
    module = nn.Linear(1024, 1024)
    count = sum(p.numel() for p in module.parameters())
    pycomm.DataParallel(module)  # deleted immediately: one-time allocations already exist
    before = _live_bytes()
    model, optimizer, _ = compressed(module, sparsity=[0.999])
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 1024)).square().mean().backward()
        optimizer.step()
    held = _live_bytes() - before
    gradients = 4 * count  # the second DataParallel's buckets
    assert held - gradients >= 8 * count
    assert held - gradients <= 1.03 * 8 * count
    assert not optimizer.state


def _live_bytes() -> int:
    """All storages that Python can reach; a sparse tensor, as tests of others keep, has none."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    tensors = [x for x in tensors if x.layout == torch.strided]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


@on_ranks(1)
def test_rejected_arguments(group: pycomm.Group) -> None:
    module = perceptron()
    with pytest.raises(Unsupported, match="LocalSGD"):
        pycomm.DGC(torch.optim.Adam(module.parameters()))
    for wrong in ({"dampening": 0.1}, {"maximize": True}):
        with pytest.raises(InvalidArgument, match="dampening"):
            pycomm.DGC(sgd(module, **wrong))
    for wrong in (
        {"clip": "all"}, {"select": "most"}, {"k_rule": "truncate"}, {"exchange": "dense"},
        {"clip_norm": 0.0}, {"sparsity": [1.0]}, {"rampup_step": 0}, {"value_dtype": "float16"},
        {"codec": "rice"}, {"codec": "raw", "exchange": "sharded"}, {"owner_k_factor": 0},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            pycomm.DGC(sgd(module), **wrong)
    words = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(Unsupported, match=r"'0.weight'.*without momentum"):
        pycomm.DataParallel(words, compression=pycomm.DGC(sgd(words)))
    groups = [{"params": [module[0].weight]}, {"params": [module[2].weight], "momentum": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9)
    dgc = pycomm.DGC(optimizer, select="model", min_count=1)
    model = pycomm.DataParallel(module, compression=dgc)
    with pytest.raises(InvalidArgument, match="one momentum"):
        step_on(model, batch(group.rank, 0), optimizer)
