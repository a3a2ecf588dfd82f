"""Buckets of DataParallel: how gradients are assigned to them, stored in them, and reassigned."""

from typing import Any

import pytest
import torch
from small_models import batch, equal, replicas, seeded
from torch import Tensor, nn
from torch.nn import functional as F

import pycomm
from pycomm.errors import InvalidArgument
from pycomm.parallel.buckets import MB, Limits, Slot, fuse, slots_of
from pycomm.testing import run_ranks


def test_fusion_by_bytes_and_layers() -> None:
    slots = slots_of(nn.Sequential(*(nn.Linear(256, 512) for _ in range(12))))

    def names(limits: Limits) -> list[list[str]]:
        return [[slot.name for slot in bucket] for bucket in fuse(slots, limits)]

    one = names(Limits.of(25, 1, 0))
    assert one == [[f"{layer}.weight", f"{layer}.bias"] for layer in range(12)]
    assert [len(bucket) for bucket in names(Limits.of(25, 5, 0))] == [
        2,
        10,
        10,
        2,
    ]  # a first MB, then five layers each
    sizes = [sum(s.bytes for s in bucket) for bucket in fuse(slots, Limits.of(2, None, 0))]
    assert max(sizes) <= 2 * MB
    assert max(sizes) > 1.5 * MB > MB >= sizes[0]
    assert [Limits.of("auto", None, mb * MB).bytes / MB for mb in (1, 55, 6400)] == [1, 5.5, 64]
    for wrong in ({"bucket_mb": 0}, {"bucket_mb": "most"}, {"bucket_layers": 0}):
        with pytest.raises(InvalidArgument):
            Limits.of(**{"bucket_mb": 25, "bucket_layers": None, **wrong}, total_bytes=1)
    assert isinstance(slots[0], Slot)


def test_gradients_are_views_into_buckets() -> None:
    def held(group: pycomm.Group, models: list[nn.Module]) -> tuple[int, int, int]:
        model = pycomm.DataParallel(models[group.rank], bucket_mb=1e-3)
        for step in range(3):
            model.zero_grad()
            with model.no_sync():
                F.mse_loss(model(batch(0, step)[0]), batch(0, step)[1]).backward()
            F.mse_loss(model(batch(1, step)[0]), batch(1, step)[1]).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        flats = [bucket.flat for bucket in model._reducer.buckets]
        memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                  for x in gradients + flats}  # fmt: skip
        return sum(memory.values()), sum(x.nbytes for x in gradients), len(flats)

    for bytes_, needed, buckets in run_ranks(2, held, replicas(2)):
        assert bytes_ <= 1.05 * needed
        assert buckets > 2


def test_buckets_follow_the_order_of_gradients() -> None:
    class Backwards(nn.Module):
        """The names of its layers are in the opposite order of their use."""

        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(20, 3), nn.Linear(16, 20)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x)))

    def program(group: pycomm.Group, models: list[nn.Module]) -> list[list[str]]:
        model = pycomm.DataParallel(models[group.rank], bucket_layers=1)
        orders = []
        for step in range(3):
            F.mse_loss(model(batch(0, step)[0]), batch(0, step)[1]).backward()
            orders.append([bucket.slots[0].name.split(".")[0] for bucket in model._reducer.buckets])
        return orders

    for orders in run_ranks(2, program, replicas(2, Backwards)):
        assert orders == [["first", "last"], ["last", "first"], ["last", "first"]]


def test_ranks_with_different_gradient_orders() -> None:
    """Also with accumulation over passes and when buckets are rebuilt: all use rank 0's order."""

    class Sum(nn.Module):
        """Sum of the layers in order, or in the opposite order."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 3) for _ in range(4))

        def forward(self, x: Tensor, opposite: bool) -> Tensor:
            y = x.new_zeros(())
            for i in reversed(range(4)) if opposite else range(4):
                y = y + self.layers[i]((1 + i) * x)  # each layer has a different gradient
            return y

    def program(group: pycomm.Group) -> list[Tensor]:
        model = pycomm.DataParallel(seeded(Sum(), 0), bucket_layers=1)
        for step in range(3):
            x, y = batch(group.rank, step)
            F.mse_loss(model(x, group.rank == 0), y).backward()
        return [p.grad for p in model.parameters()]

    one = seeded(Sum(), 0)
    for step in range(3):
        for rank in range(2):
            x, y = batch(rank, step)
            (F.mse_loss(one(x, False), y) / 2).backward()
    for result in run_ranks(2, program):
        torch.testing.assert_close(result, [p.grad for p in one.parameters()])


def test_reproducible_sums_do_not_depend_on_buckets() -> None:
    """Long enough for a ring, whose chunks would differ in other buckets."""

    def program(group: pycomm.Group, form: dict[str, Any]) -> list[Tensor]:
        model = pycomm.DataParallel(seeded(nn.Linear(16, 30_000), 1), **form)
        model(batch(group.rank, 0)[0]).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    forms: list[dict[str, Any]] = [{}, {"bucket_mb": 0.2}]
    results = [run_ranks(3, program, form, reproducible=True) for form in forms]
    assert equal(results[0][0], results[1][2])
