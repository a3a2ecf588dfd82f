"""Sharded tensors over ranks, unchanged on pycomm: functional collectives and their gradients,
DTensor, device meshes, fully_shard and tensor parallelism. Each compared with gloo and one process.

The functions `_...` run in the processes of torch_ranks.py.
"""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

# pytest finds the fixtures by name, so that they look unused.
from torch_ranks import (  # noqa: F401 - a fixture
    SIZES,
    Run,
    both_fixture,
    run_fixture,
    same,
    values,
)


def _functional() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    a, b = values(rank, (3, 4), torch.float32), values(rank, (2 * size, 3), torch.float32)
    found: dict[str, Any] = {
        "broadcast": functional.broadcast(a, 1, group),
        "gather rows": functional.all_gather_tensor(a, 0, group),
        "gather columns": functional.all_gather_tensor(a, 1, group),
        "gather both": functional.all_gather_into_tensor_coalesced([a, b], group),
        "scatter both": functional.reduce_scatter_tensor_coalesced(
            [b, 2 * b], "sum", [0, 0], group
        ),
        "scatter columns": functional.reduce_scatter_tensor(b.t().contiguous(), "sum", 1, group),
        "reduce both": functional.all_reduce_coalesced([a, b], "max", group),
        "turn": functional.permute_tensor(
            a.flatten(), [(r + 1) % size for r in range(size)], group
        ),
    }
    splits = [1 + (rank + peer) % 2 for peer in range(size)]
    rows = torch.full((sum(splits), 2), float(rank))
    found["uneven"] = functional.all_to_all_single(rows, splits, splits, group)
    results = {name: _waited(value) for name, value in found.items()}
    return {**results, "inputs": [a, b]}


def _waited(value: Any) -> Any:
    """Plain tensors of those that wait when they are used."""
    if isinstance(value, list):
        return [_waited(x) for x in value]
    return functional.wait_tensor(value)


@SIZES
def test_functional_collectives(both: Run, size: int) -> None:
    everyone = both(size, _functional)
    a = [values(r, (3, 4), torch.float32) for r in range(size)]
    b = [values(r, (2 * size, 3), torch.float32) for r in range(size)]
    for rank, found in enumerate(everyone):
        same(found["broadcast"], a[1], "broadcast")
        same(found["gather columns"], torch.cat(a, 1), "columns")
        same(found["gather both"][1], torch.cat(b), "both")
        same(found["inputs"][1], b[rank], "inputs stay as they are")
        mine = slice(2 * rank, 2 * rank + 2)
        same(found["scatter both"][1], 2 * sum(b)[mine], "scatter both")
        same(found["scatter columns"], sum(b).t()[:, mine], "scatter columns")
        same(found["turn"], a[(rank - 1) % size].flatten(), "turn")
        wanted = [float(r) for r in range(size) for _ in range(1 + (rank + r) % 2)]
        assert found["uneven"][:, 0].tolist() == wanted


def _gradients() -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    x = torch.full((size, 2), rank + 1.0, requires_grad=True)
    gathered = functional.all_gather_tensor_autograd(x, 0, group)
    scattered = functional.reduce_scatter_tensor_autograd(x * x, "sum", 0, group)
    even = [1] * size
    swapped = functional.all_to_all_single_autograd(x * 3, even, even, group)
    ones = [torch.ones_like(one) for one in (gathered, scattered)]  # for contiguous gradients
    loss = (rank + 1) * ((gathered * ones[0]).sum() + (scattered * ones[1]).sum())
    loss = loss + (swapped * swapped).sum()
    loss.backward()
    assert x.grad is not None
    return [x.grad, loss.detach()]


@SIZES
def test_gradients_of_collectives(both: Run, size: int) -> None:
    everyone = both(size, _gradients)
    ranks = size * (size + 1) / 2
    for rank, (gradient, _) in enumerate(everyone):
        x = rank + 1.0
        # gather: every rank's use of my rows; scatter: row r is sent to rank r and weighted there.
        wanted = [ranks + 2 * x * (peer + 1) + 2 * 9 * x for peer in range(size)]
        assert gradient[:, 0].tolist() == wanted


def _dtensor() -> list[torch.Tensor]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(7 * 5.0).reshape(7, 5)  # 7 and 5 rows do not divide evenly
    kinds: list[Placement] = [Replicate(), Shard(0), Shard(1)]
    results = []
    for before, after in itertools.product(kinds, kinds):
        moved = distribute_tensor(whole, mesh, [before]).redistribute(mesh, [after])
        same(moved.full_tensor(), whole, (before, after))
        results.append(moved.to_local())
    local = whole * (dist.get_rank() + 1)
    for after in kinds:
        summed = DTensor.from_local(local, mesh, [Partial()]).redistribute(mesh, [after])
        same(summed.full_tensor(), whole * (size * (size + 1) // 2), ("partial", after))
    left, right = torch.randn(6, 8), torch.randn(8, 4)
    for a, b in itertools.product(kinds, kinds):
        sharded = (distribute_tensor(x, mesh, [p]) for x, p in ((left, a), (right, b)))
        product = torch.matmul(*sharded).full_tensor()
        torch.testing.assert_close(product, left @ right)
        results.append(product)
    grown = distribute_tensor(left, mesh, [Shard(0)]).requires_grad_()
    (grown * grown).sum().full_tensor().backward()
    assert grown.grad is not None
    torch.testing.assert_close(grown.grad.full_tensor(), 2 * left)
    return results


@SIZES
def test_dtensor(both: Run, size: int) -> None:
    both(size, _seeded, _dtensor)


def _seeded(fn: Any, *args: Any) -> Any:
    """The same random numbers on every rank and backend."""
    torch.manual_seed(5)
    return fn(*args)


def _mesh() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    rank = dist.get_rank()
    sums = []
    for name in ("outer", "inner"):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=mesh.get_group(name))
        assert mesh[name].size() == 2
        sums.append(x)
    assert [x.item() for x in sums] == [2 * (rank % 2) + 2, 4 * (rank // 2) + 1]
    whole = torch.arange(6 * 5.0).reshape(6, 5)
    kinds: list[Placement] = [Replicate(), Shard(0), Shard(1)]
    for before, after in itertools.product(itertools.product(kinds, kinds), repeat=2):
        moved = distribute_tensor(whole, mesh, before).redistribute(mesh, after)
        same(moved.full_tensor(), whole, (before, after))
    return sums


def test_a_mesh_of_two_by_two(both: Run) -> None:
    both(4, _mesh)


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 13), nn.ReLU(), nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 3))


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 8, generator=made), torch.randn(4, 3, generator=made)


def _train_alone(ranks: int, steps: int = 2) -> nn.Sequential:
    """The result of one process for the batches of all ranks."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        batches = [_batch(rank, step) for rank in range(ranks)]
        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _fsdp(shape: tuple[int, ...]) -> list[torch.Tensor]:
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(2):
        x, y = _batch(dist.get_rank(), step)
        nn.functional.mse_loss(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert norm.full_tensor().item() > 0  # type: ignore[attr-defined]  # a DTensor
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]  # a DTensor


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=["2", "3", "2x2"])
def test_fully_shard_equals_one_process(both: Run, shape: tuple[int, ...]) -> None:
    size = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
    everyone = both(size, _fsdp, shape)
    alone = [parameter.detach() for parameter in _train_alone(size).parameters()]
    for got in everyone:
        torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-5)
        for mine, first in zip(got, everyone[0], strict=True):
            same(mine, first, "ranks agree")


def _tensor_parallel() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 5))
    x = torch.randn(6, 8)
    wanted = plain(x)
    wanted.square().sum().backward()
    split = parallelize_module(
        copy.deepcopy(plain), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    split.zero_grad()
    got = split(x)
    got.square().sum().backward()
    torch.testing.assert_close(got, wanted)
    for sharded, whole in zip(split.parameters(), plain.parameters(), strict=True):
        gradient = sharded.grad
        assert isinstance(gradient, DTensor)
        torch.testing.assert_close(gradient.full_tensor(), whole.grad)
    return [got.detach()]


@SIZES
def test_tensor_parallel_equals_one_process(both: Run, size: int) -> None:
    both(size, _tensor_parallel)
