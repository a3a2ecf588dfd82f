"""SyncBatchNorm: every rank against torch's layer in one process with the whole batch."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from small_models import equal, replicas, seeded
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import Run, run_fixture  # noqa: F401 - a fixture

import pycomm
from pycomm.errors import InvalidArgument, Mismatch, Unsupported
from pycomm.parallel.batch_norm import _statistics
from pycomm.testing import run_ranks

CHANNELS = 5
KINDS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "features": (nn.BatchNorm1d, ()),
    "1d": (nn.BatchNorm1d, (7,)),
    "2d": (nn.BatchNorm2d, (3, 4)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
}
FORMS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"eps": 0.1, "momentum": 0.5},
]


def filled(made: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=made, dtype=torch.float64) * 3


def passes(
    layer: Any, x: Tensor, dy: Tensor, dtype: torch.dtype, channels_last: bool = False
) -> dict[str, Any]:
    """Two forward and backward passes of the layer on these elements: all that they computed."""
    found: dict[str, Any] = {}
    for step in range(2):
        leaf = (x + step).to(dtype)
        if channels_last:
            leaf = leaf.to(memory_format=torch.channels_last)
        y = layer(leaf.requires_grad_())
        assert y.dtype == dtype
        y.backward(dy.to(dtype))
        found |= {f"y{step}": y.detach(), f"dx{step}": leaf.grad}
    found |= {name: p.grad for name, p in layer.named_parameters()}
    return found | {name: b.clone() for name, b in layer.named_buffers()}


def as_one_process(
    group: pycomm.Group,
    kind: str,
    form: dict[str, Any],
    batches: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    channels_last: bool = False,
    **tolerance: float,
) -> None:
    make, rest = KINDS[kind]
    made = torch.Generator().manual_seed(len(batches))
    whole = [filled(made, (sum(batches), CHANNELS, *rest)) for _ in range(2)]
    parts = [x.split(batches)[group.rank] for x in whole]
    wide = torch.promote_types(dtype, torch.float32)
    alone = seeded(make(CHANNELS, **form), 3).to(wide)
    ours = pycomm.SyncBatchNorm(CHANNELS, **form).to(wide)
    ours.load_state_dict(alone.state_dict())
    # In float64, so that the difference is pycomm's rounding alone.
    wanted = passes(alone.double(), whole[0].to(dtype).double(), whole[1], torch.float64)
    found = passes(ours, *parts, dtype, channels_last)
    assert list(found) == list(wanted)
    for name, own in found.items():
        value, expected = own, wanted[name]
        if name in ("weight", "bias"):  # this rank's part of the sum
            value = pycomm.all_reduce(own.clone(), group=group)
        elif name.startswith(("y", "dx")):
            expected = expected.split(batches)[group.rank]
        torch.testing.assert_close(
            *(value, expected.to(value.dtype)),
            msg=lambda text, name=name: f"{name}: {text}",
            **tolerance or {"rtol": 1e-5, "atol": 2e-5},
        )


@pytest.mark.parametrize("form", FORMS, ids=lambda form: ",".join(form) or "default")
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_process_with_the_whole_batch(kind: str, form: dict[str, Any]) -> None:
    run_ranks(2, as_one_process, kind, form, (4, 4))


@pytest.mark.parametrize("batches", [(1, 6), (3, 0, 2), (0, 1, 1), (5,)], ids=str)
@pytest.mark.parametrize("kind", ["features", "2d"])
def test_batches_of_different_sizes(kind: str, batches: tuple[int, ...]) -> None:
    run_ranks(len(batches), as_one_process, kind, {}, batches)


@on_ranks(2)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, {"rtol": 1e-12, "atol": 1e-12}),
        (torch.bfloat16, {"rtol": 0.02, "atol": 0.05}),
        (torch.float16, {"rtol": 0.003, "atol": 0.01}),
    ],
    ids=str,
)
def test_dtypes(group: pycomm.Group, dtype: torch.dtype, tolerance: dict[str, float]) -> None:
    as_one_process(group, "2d", {}, (3, 5), dtype, **tolerance)


@on_ranks(2)
def test_channels_last(group: pycomm.Group) -> None:
    as_one_process(group, "2d", {}, (3, 5), channels_last=True)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_variance_has_no_cancellation(group: pycomm.Group, dtype: torch.dtype) -> list[Tensor]:
    """With a mean of many deviations, E[x^2] - E[x]^2 in float32 has no correct digit; a mean in
    bfloat16 has only two."""
    made = torch.Generator().manual_seed(0)
    offset = 2e4 if dtype is torch.float32 else 300.0
    whole = (filled(made, (600, CHANNELS, 4)) + offset).to(dtype)
    mean, variance, count = _statistics(whole.split((100, 500))[group.rank], group)
    exact = torch.var_mean(whole.double(), (0, 2), correction=0)
    torch.testing.assert_close(variance.double(), exact[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(mean.double(), exact[1], rtol=1e-6, atol=0)
    assert (count, mean.dtype) == (2400, torch.float32)
    return [mean, variance, count]


@on_ranks(4)
def test_all_ranks_compute_the_same_bits(group: pycomm.Group) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    parts = [filled(made, (5 + 7 * r, CHANNELS, 11)).float() for r in range(4)]
    layer = pycomm.SyncBatchNorm(CHANNELS)
    layer(parts[group.rank])
    return list(layer.buffers())


def test_evaluation_and_a_single_rank_are_torchs_layer() -> None:
    x = filled(torch.Generator().manual_seed(0), (6, CHANNELS)).float()

    def program(group: pycomm.Group) -> None:
        for form in ({}, {"track_running_stats": False}, {"momentum": None}):
            ours, theirs = pycomm.SyncBatchNorm(CHANNELS, **form), nn.BatchNorm1d(CHANNELS, **form)
            calls = group.stats().calls
            if group.size == 1:
                assert torch.equal(ours(x), theirs(x))
            else:
                theirs.load_state_dict(ours.state_dict())
            ours.eval(), theirs.eval()
            assert torch.equal(ours(x[group.rank :]), theirs(x[group.rank :]))
            assert group.stats().calls == calls
            assert equal(list(ours.buffers()), list(theirs.buffers()))

    run_ranks(1, program)
    run_ranks(2, program)


@on_ranks(2)
def test_calls_of_a_pass(group: pycomm.Group) -> None:
    """One in each direction; none back where only the parameters have gradients."""
    layer = pycomm.SyncBatchNorm(CHANNELS)
    found = []
    for needs_gradient in (True, False):
        x = torch.ones(2, CHANNELS, requires_grad=needs_gradient)
        calls = [group.stats().calls]
        y = layer(x)
        calls.append(group.stats().calls)
        y.sum().backward()  # an expanded gradient
        calls.append(group.stats().calls)
        found += [later - earlier for earlier, later in itertools.pairwise(calls)]
    assert found == [1, 1, 1, 0]


@on_ranks(2)
def test_errors(group: pycomm.Group) -> None:
    layer = pycomm.SyncBatchNorm(CHANNELS)
    calls = group.stats().calls
    for wrong in (
        torch.ones(CHANNELS),
        torch.ones(2, CHANNELS + 1),
        torch.ones(2, CHANNELS, dtype=torch.int64),
    ):
        with pytest.raises(InvalidArgument, match=r"expected floats of shape \[N, 5\]"):
            layer(wrong)
    assert group.stats().calls == calls
    for rows in ([0, 1], [0, 0]):
        x = torch.ones(rows[group.rank], CHANNELS)
        with pytest.raises(ValueError, match=f"got {sum(rows)} values per channel on all"):
            layer(x)
    assert layer.num_batches_tracked == 0
    with pytest.raises(Mismatch):
        pycomm.SyncBatchNorm(2 + group.rank)(torch.ones(4, 2 + group.rank))
    with pytest.raises(Mismatch):
        layer(torch.ones(4, CHANNELS, dtype=[torch.float32, torch.float64][group.rank]))
    assert layer(torch.randn(4, CHANNELS)).shape == (4, CHANNELS)
    for make in (pycomm.SyncBatchNorm, layer.convert_sync_batchnorm):
        with pytest.raises(TypeError, match="pass a pycomm group as group="):
            make(nn.ReLU(), process_group=None)


def test_conversion() -> None:
    shared = nn.BatchNorm1d(4, eps=0.25, momentum=None)
    model = nn.Sequential(
        nn.Linear(4, 4),
        shared,
        nn.Sequential(nn.BatchNorm2d(3, affine=False, track_running_stats=False), nn.ReLU()),
        shared,
        nn.LayerNorm(4),
    )
    model[2].eval()
    state = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    made = pycomm.SyncBatchNorm.convert_sync_batchnorm(model)
    assert made is model
    layer, inner = model[1], model[2][0]
    assert isinstance(layer, pycomm.SyncBatchNorm)
    assert isinstance(inner, pycomm.SyncBatchNorm)
    assert model[3] is layer
    assert (layer.eps, layer.momentum, layer.training) == (0.25, None, True)
    assert (inner.affine, inner.track_running_stats, inner.training) == (False, False, False)
    assert layer.running_mean is shared.running_mean
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert list(model.state_dict()) == list(state)
    assert isinstance(model[0], nn.Linear)
    assert isinstance(model[4], nn.LayerNorm)
    alone = pycomm.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm3d(2).half())
    assert (type(alone), alone.weight.dtype) == (pycomm.SyncBatchNorm, torch.float16)
    without_bias = nn.BatchNorm1d(2)
    without_bias.register_parameter("bias", None)
    assert pycomm.SyncBatchNorm.convert_sync_batchnorm(without_bias).bias is None
    with pytest.raises(InvalidArgument, match="LazyBatchNorm1d has had no input"):
        pycomm.SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm1d())


def test_a_subgroup_and_a_copy() -> None:
    def program(group: pycomm.Group) -> Tensor:
        half = group.split(group.rank // 2)
        model = pycomm.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(1), half)
        model = copy.deepcopy(model)
        assert model.group is half
        model(torch.full((1, 1), float(group.rank)))
        return model.running_mean

    means = run_ranks(4, program)
    torch.testing.assert_close(torch.cat(means), torch.tensor([0.05, 0.05, 0.25, 0.25]))


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (3, 6, 6):
        layers += [nn.Conv2d(channels, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()]
    return seeded(nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 16, 4)), 1)


def synchronized() -> nn.Module:
    return pycomm.SyncBatchNorm.convert_sync_batchnorm(network())


BATCHES = [(2, 4), (3, 3), (6, 0), (1, 5)]


def train(model: nn.Module, rank: int | None) -> list[Tensor]:
    """The parameters and running statistics after steps on the rank's rows; None: on all rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    made = torch.Generator().manual_seed(0)
    for batches in BATCHES:
        x = torch.randn(6, 3, 4, 4, generator=made)
        labels = torch.randint(4, (6,), generator=made)
        ranks = 1
        if rank is not None:
            x, labels, ranks = x.split(batches)[rank], labels.split(batches)[rank], 2
        optimizer.zero_grad()
        # The mean over the ranks of this is the mean over all rows.
        loss = nn.functional.cross_entropy(model(x), labels, reduction="sum") * ranks / 6
        loss.backward()
        optimizer.step()
    return [x.detach().clone() for x in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize(
    "form",
    [{}, {"bucket_layers": 1}, {"bucket_mb": 1e-4, "lanes": 3}, {"broadcast_buffers": False}],
    ids=lambda form: ",".join(form) or "default",
)
def test_training_under_data_parallel_equals_one_process(form: dict[str, Any]) -> None:
    def program(group: pycomm.Group, models: list[nn.Module]) -> list[Tensor]:
        return train(pycomm.DataParallel(models[group.rank], **form), group.rank)

    results = run_ranks(2, program, replicas(2, synchronized))
    assert equal(*results)
    torch.testing.assert_close(results[0], train(network(), None), rtol=1e-4, atol=1e-5)


def _under_ddp() -> list[Tensor]:
    model = DistributedDataParallel(synchronized(), bucket_cap_mb=1e-4)
    return train(model, dist.get_rank())


def test_training_under_ddp_equals_one_process(run: Run) -> None:
    """After init_process_group alone: torch's group is pycomm's default group."""
    results = run(2, _under_ddp)
    assert equal(*results)
    torch.testing.assert_close(results[0], train(network(), None), rtol=1e-4, atol=1e-5)


def test_join_is_refused() -> None:
    def program(group: pycomm.Group, models: list[nn.Module]) -> None:
        model = pycomm.DataParallel(models[group.rank])
        calls = group.stats().calls
        with pytest.raises(Unsupported, match="pass empty batches"), model.join():
            pass
        assert group.stats().calls == calls

    run_ranks(2, program, replicas(2, synchronized))


def test_shrink_replaces_the_group_of_the_layers() -> None:
    def program(group: pycomm.Group, models: list[nn.Module]) -> None:
        own = group.split(0)
        other = group.split(0)
        model = models[group.rank]
        pycomm.SyncBatchNorm.convert_sync_batchnorm(model, own)
        model[4].group = other
        parallel = pycomm.DataParallel(model, group=own)
        parallel.shrink()
        assert model[1].group is model[7].group is parallel._group
        assert model[1].group is not own
        assert model[4].group is other

    run_ranks(2, program, replicas(2, network))
