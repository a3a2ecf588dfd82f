"""LocalSGD with compression on the shards of FSDP2, whose replicas exchange updates.

The functions `_...` run in the processes of torch_ranks.py, as a mesh of 2 replicas x 2 shards, or
of 1 replica where the test says so.
"""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hsdp_training import backward, full_parts, local_parts, mesh_of, sharded
from quantized_training import wide
from small_models import batch, equal
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch_ranks import Run, in_processes, run_fixture  # noqa: F401 - a fixture
from update_training import FEW_BITS, SHARDED, SMALL, adamw, residuals_of, sgd

import pycomm
from pycomm import TopK
from pycomm.default_group import default
from pycomm.errors import Error, InvalidArgument, Mismatch, Unsupported

COMPRESSIONS = pytest.mark.parametrize(
    "compression", [SMALL, SHARDED, FEW_BITS], ids=["topk", "topk, sharded", "quantize"]
)
EXACT = TopK(density=1.0, group=4, value_dtype="float32")
STEPS = 4


class Scale(nn.Module):
    """A factor: its parameter has one element, so that one of two shards is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _model(seed: int = 1) -> nn.Sequential:
    return nn.Sequential(*wide(seed), Scale())


def _training(
    compression: Any, make: Callable[..., Any] = sgd, replicas: int = 2, **options: Any
) -> tuple[Any, torch.optim.Optimizer, pycomm.LocalSGD]:
    """Replicas that differ until they take the parameters of the first one."""
    mesh = mesh_of(replicas)
    model = sharded(mesh["shard"], _model(1 + mesh.get_local_rank("replicate")))
    optimizer = make(model)
    local = pycomm.LocalSGD(
        model, optimizer, compression=compression, replicas=mesh["replicate"], **options
    )
    return model, optimizer, local


def _step(model: nn.Module, local: pycomm.LocalSGD, step: int) -> None:
    local.zero_grad()
    backward(model, step)
    local.step()


def _mine(whole: Tensor) -> Tensor:
    """This rank's shard of a tensor."""
    chunks = whole.chunk(2)
    return chunks[dist.get_rank() % 2] if dist.get_rank() % 2 < len(chunks) else whole[:0]


def _conserved(compression: Any, make: Callable[..., Any], limit: float | None) -> Any:
    """(parameters, what the optimizer of an unsharded replica gave, what arrived, the state)."""
    model, optimizer, local = _training(compression, make, clip_norm=limit)
    plain = _model()
    alone = make(plain)
    decay = 1.0
    if make is adamw:
        (group,) = optimizer.param_groups
        decay = 1 - group["lr"] * group["weight_decay"]
        alone.param_groups[0]["weight_decay"] = 0.0  # which ranks apply to the shared parameters
    shards = local._shards._ranks  # type: ignore[union-attr]  # has shards
    given = [torch.zeros(x.shape, dtype=torch.float64) for x in local_parts(model)]
    arrived = [x.clone() for x in given]
    for step in range(STEPS):
        start, before = full_parts(model), local_parts(model)
        _step(model, local, step)
        for p, x in zip(plain.parameters(), start, strict=True):
            p.data.copy_(x)
        plain.zero_grad()
        backward(plain, step)
        for p in plain.parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=shards)
        if limit is not None:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), limit * 2**0.5)
            assert float(norm) > 1.5 * limit  # it clips
        alone.step()
        rows = zip(
            given, arrived, start, plain.parameters(), before, local_parts(model), strict=True
        )
        for all_given, all_arrived, whole, p, old, new in rows:
            all_given.add_(_mine(whole - p.detach()))
            all_arrived.add_(decay * old.double() - new.double(), alpha=2)
    return local_parts(model), given, arrived, local.state_dict(), local.stats()


@pytest.mark.parametrize(("make", "limit"), [(sgd, 0.1), (adamw, None)], ids=["clipped", "adamw"])
@COMPRESSIONS
def test_replicas_are_equal_and_updates_are_conserved(
    run: Run, compression: Any, make: Callable[..., Any], limit: float | None
) -> None:
    """For each shard: what arrived, times two replicas, plus residuals is all that was given, by
    the same optimizer with the gradient of the whole replica."""
    results = run(4, _conserved, compression, make, limit)
    for shard in range(2):
        first, second = results[shard], results[2 + shard]
        assert equal(first[0], second[0])
        assert (second[3]["rank"], second[3]["size"]) == (1, 2)
        lost = [residuals_of(one[3], isinstance(compression, TopK)) for one in (first, second)]
        rows = zip(first[2], first[1], second[1], *lost, strict=True)
        for arrived, mine, other, rest, rest_of_other in rows:
            residual = (rest.double() + rest_of_other.double()).view(arrived.shape)
            torch.testing.assert_close(arrived + residual, mine + other, atol=1e-5, rtol=0)
        assert sum(float(x.abs().sum()) for x in lost[0]) > 1e-3
        assert 0 < first[4]["sent_bytes"] < first[4]["dense_bytes"] / 4
        assert first[4]["dense_bytes"] == 4 * sum(x.numel() for x in first[0])


def _moved(compression: Any, outer: bool) -> Any:
    options: dict[str, Any] = {}
    mesh = mesh_of()
    model = sharded(mesh["shard"], _model())
    if outer:
        options = {"outer": torch.optim.SGD(model.parameters(), lr=0.5)}
    if compression is None:
        model = sharded(mesh, _model())  # fully_shard averages over the replicas
        local: Any = sgd(model)
    else:
        local = pycomm.LocalSGD(
            model, sgd(model), compression=compression, replicas=mesh["replicate"], **options
        )
    for step in range(STEPS):
        if compression is None and outer and step == 1:
            local.param_groups[0]["lr"] /= 2
        _step(model, local, step)
    return full_parts(model)


@pytest.mark.parametrize("outer", [False, True])
def test_all_groups_uncompressed_are_hybrid_sharding(run: Run, outer: bool) -> None:
    """An outer optimizer that steps by half of the mean update halves the learning rate, after
    begin_step."""
    wanted = run(4, _moved, None, outer)[0]
    for found in run(4, _moved, EXACT, outer):
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def _resumed(compression: Any, steps: int, states: bytes | None) -> Any:
    model, optimizer, local = _training(compression)
    if states is not None:
        weights, velocities, own = pickle.loads(states)[dist.get_rank()]
        for p, saved, velocity in zip(model.parameters(), weights, velocities, strict=True):
            p.detach().to_local().copy_(saved)  # type: ignore[attr-defined]  # a DTensor
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
            optimizer.state[p]["momentum_buffer"].to_local().copy_(velocity)
        local.load_state_dict(own)
    for step in range(local.step_count, steps):
        _step(model, local, step)
    velocities = [optimizer.state[p]["momentum_buffer"].to_local() for p in model.parameters()]
    return local_parts(model), velocities, local.state_dict()


@COMPRESSIONS
def test_a_state_resumes_bit_for_bit(run: Run, compression: Any) -> None:
    whole = run(4, _resumed, compression, 5, None)
    states = pickle.dumps(run(4, _resumed, compression, 3, None))
    for found, wanted in zip(run(4, _resumed, compression, 5, states), whole, strict=True):
        assert equal(found[0], wanted[0])
        assert found[2]["step_count"] == 5


def _gathered(compression: Any) -> Any:
    model, optimizer, local = _training(compression, adamw)
    for step in range(3):
        _step(model, local, step)
    moments = [optimizer.state[p]["exp_avg_sq"].to_local() for p in model.parameters()]
    return moments, local.gather_state(1)


def _loaded(compression: Any, states: bytes) -> Any:
    """On one replica."""
    model, optimizer, local = _training(compression, adamw, 1)
    local.load_state_dict(pickle.loads(states)[dist.get_rank()])
    moments = [optimizer.state[p]["exp_avg_sq"].to_local().clone() for p in model.parameters()]
    state = local.state_dict()
    _step(model, local, 3)
    return moments, state, local.step_count


@COMPRESSIONS
def test_another_number_of_replicas_takes_the_mean(run: Run, compression: Any) -> None:
    results = run(4, _gathered, compression)
    assert results[0][1] is results[1][1] is None
    states = [results[2 + shard][1] for shard in range(2)]
    loaded = run(2, _loaded, compression, pickle.dumps(states))
    for shard, (moments, state, steps) in enumerate(loaded):
        assert (state["rank"], state["size"], steps) == (0, 1, 4)
        ranks = states[shard]["ranks"]
        saved = [residuals_of(one, isinstance(compression, TopK)) for one in ranks]
        found = residuals_of(state, isinstance(compression, TopK))
        for x, *rows in zip(found, *saved, strict=True):
            torch.testing.assert_close(x, torch.stack(rows).mean(0), atol=1e-7, rtol=0)
        assert sum(float(x.abs().sum()) for x in found) > 0
        own = [results[shard][0], results[2 + shard][0]]
        assert not equal(*own)
        for x, *rows in zip(moments, *own, strict=True):
            torch.testing.assert_close(x, torch.stack(rows).mean(0))


def _overflow(k_steps: int) -> Any:
    """Steps that were skipped, and the scale. In step 1 the gradient of rank 3 overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, _, local = _training(SMALL, k_steps=k_steps, begin_step=1)
    skipped = []
    for step in range(3):
        before = local_parts(model)
        local.zero_grad()
        x, y = batch(dist.get_rank(), step)
        factor = float("inf") if step == 1 and dist.get_rank() == 3 else 1.0
        scaler.scale(F.mse_loss(model(x), y) * factor).backward()
        scaler.step(local)
        scaler.update()
        skipped.append(equal(before, local_parts(model)))
    return skipped, scaler.get_scale()


def test_an_overflow_on_one_rank_skips_the_step_on_all(run: Run) -> None:
    results = run(4, _overflow, 1)
    assert [skipped for skipped, _ in results] == [[False, True, False]] * 4
    assert [scale for _, scale in results] == [1024, 1024, 512, 512]  # by replica


def test_an_overflow_between_averages_skips_the_step_of_the_replica(run: Run) -> None:
    results = run(4, _overflow, 3)
    assert [skipped[1] for skipped, _ in results] == [False, False, True, True]


def _failed() -> Any:
    """Rank 3 has another weight decay in step 1, so that only the exchange of its shard fails."""
    model, optimizer, local = _training(SMALL, adamw)
    _step(model, local, 0)
    (group,) = optimizer.param_groups
    before, usual = local_parts(model), group["weight_decay"]
    if dist.get_rank() == 3:
        group["weight_decay"] = 0.7
    expected = Mismatch if dist.get_rank() in (1, 3) else Error
    with pytest.raises(expected, match="ranks differ" if expected is Mismatch else "another shard"):
        _step(model, local, 1)
    assert equal(before, local_parts(model))
    assert sum(float(x.abs().sum()) for x in residuals_of(local.state_dict(), True)) > 0
    group["weight_decay"] = usual
    local._compressor.decay = [1.0] * len(before)  # type: ignore[union-attr]  # of the failed step
    _step(model, local, 2)
    assert not equal(before, local_parts(model))
    return full_parts(model)


def test_a_shard_that_fails_fails_the_step_of_all(run: Run) -> None:
    results = run(4, _failed)
    assert all(equal(found, results[0]) for found in results)


@in_processes(4)
def test_wrong_arguments_name_what_to_use() -> None:
    mesh = mesh_of()
    model = sharded(mesh["shard"], _model())
    optimizer, replicas = sgd(model), mesh["replicate"]
    with pytest.raises(Unsupported, match=r'replicas=mesh\["replicate"\]'):
        pycomm.LocalSGD(model, optimizer, compression=SMALL)
    for options in (
        {"compression": None},
        {"compression": SMALL, "group": default()},
        {"compression": SMALL, "muon": optimizer},
    ):
        with pytest.raises(InvalidArgument, match="replicas needs compression, no group"):
            pycomm.LocalSGD(model, optimizer, replicas=replicas, **options)
    plain = wide()
    grid = nn.Linear(4, 4, bias=False)
    tiles = distribute_tensor(grid.weight.detach(), mesh, [Shard(0), Shard(1)])
    grid.weight = nn.Parameter(tiles)
    for wrong, given, message in (
        (model, mesh, "dimensions"),
        (plain, replicas, "no shard"),
        (sharded(mesh, _model()), replicas, "itself"),
        (grid, replicas, "has placements"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            pycomm.LocalSGD(wrong, sgd(wrong), compression=SMALL, replicas=given)
    for parameter in plain.parameters():
        parameter.requires_grad = False
    with pytest.raises(InvalidArgument, match="on 0 meshes"):
        pycomm.LocalSGD(plain, optimizer, compression=SMALL, replicas=replicas)
    local = pycomm.LocalSGD(model, optimizer, compression=SMALL, replicas=replicas)
    with pytest.raises(Unsupported, match="a lost rank takes"):
        local.shrink()
    with pytest.raises(Unsupported, match="a lost rank takes"):
        local.replace()


def _too_small() -> str:
    mesh = mesh_of()
    model = nn.Sequential(nn.Linear(1024, 3, bias=False))  # shards of two rows and of one
    fully_shard(model, mesh=mesh["shard"])
    with pytest.raises(Error) as found:
        pycomm.LocalSGD(model, sgd(model), compression=TopK(ratio=50), replicas=mesh["replicate"])
    return str(found.value)


def test_a_shard_too_small_for_the_ratio_raises_on_all_ranks(run: Run) -> None:
    found = run(4, _too_small)
    assert [text.split(":")[0] for text in found] == ["LocalSGD", "invalid ratio"] * 2
