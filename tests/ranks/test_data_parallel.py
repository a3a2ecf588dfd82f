"""DataParallel: the mean over ranks, when it is exchanged, and the promises of docs/training.md."""

import copy
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from small_models import (
    alone,
    batch,
    equal,
    momentum_sgd,
    parameters,
    perceptron,
    replicas,
    seeded,
    step_on,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import Run, in_processes, run_fixture  # noqa: F401 - a fixture

import pycomm
from pycomm._training.communicators import CommunicatorPool
from pycomm.errors import InvalidArgument, Mismatch, Unsupported
from pycomm.testing import run_ranks

STEPS = 4
FORMS: list[dict[str, Any]] = [
    {},
    {"bucket_layers": 1},
    {"bucket_mb": 1e-4},
    {"bucket_mb": "auto", "lanes": 3},
    {"hierarchical": True, "find_unused_parameters": True},
]


def trained(group: pycomm.Group, models: list[nn.Module], form: dict[str, Any]) -> list[Tensor]:
    model = pycomm.DataParallel(models[group.rank], group=group, **form)
    optimizer = momentum_sgd(model)
    for step in range(STEPS):
        step_on(model, batch(group.rank, step), optimizer)
    return parameters(model)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: ",".join(form) or "default")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equals_one_process_on_all_batches(ranks: int, form: dict[str, Any]) -> None:
    results = run_ranks(ranks, trained, replicas(ranks), form)
    assert all(equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], alone(perceptron(), STEPS, ranks))


@in_processes(2)
def test_the_same_bits_as_ddp() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for wrap in (pycomm.DataParallel, DistributedDataParallel):
        model = wrap(perceptron())
        optimizer = momentum_sgd(model)
        for step in range(STEPS):
            step_on(model, batch(rank, step), optimizer)
        found.append(parameters(model))
    assert size == 2
    assert equal(*found)


class Tied(nn.Module):
    """Shared weights, a parameter outside a layer, one of another dtype, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.picture = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        y: Tensor = self.picture(x.view(-1, 2, 2, 4)).mean((2, 3))
        return y * self.scale.float()


def test_any_module() -> None:
    model = seeded(Tied(), 0)
    models = [copy.deepcopy(model) for _ in range(2)]
    results = run_ranks(2, trained, models, {"bucket_mb": 1e-4})
    assert equal(*results)
    torch.testing.assert_close(results[0], alone(model, STEPS, 2))


@pytest.mark.parametrize("verb", ["all_reduce", "all_gather"])
def test_bucket_is_reduced_before_the_last_gradient_exists(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward stops at its last gradient until the first bucket, or DGC's first packet, was
    received from all ranks."""
    works: dict[int, list[pycomm.Work]] = {0: [], 1: []}
    start = getattr(CommunicatorPool, verb)

    def kept(pool: CommunicatorPool, *args: Any) -> pycomm.Work:
        work: pycomm.Work = start(pool, *args)
        works[pool.group.rank].append(work)
        return work

    monkeypatch.setattr(CommunicatorPool, verb, kept)

    def program(group: pycomm.Group, models: list[nn.Module]) -> bool:
        module, dgc = models[group.rank], None
        if verb == "all_gather":
            dgc = pycomm.DGC(momentum_sgd(module), sparsity=[0.9], min_count=1)
        model = pycomm.DataParallel(module, compression=dgc, bucket_layers=1)
        seen = []

        def at_last_gradient(_: Tensor) -> None:
            end = time.monotonic() + 20
            while not (works[group.rank] and works[group.rank][0].done()):
                assert time.monotonic() < end, "nothing was sent during backward"
            seen.append(len(works[group.rank]))

        next(iter(model.parameters())).register_hook(at_last_gradient)
        F.mse_loss(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
        return seen == [2] and len(works[group.rank]) == 3

    assert run_ranks(2, program, replicas(2)) == [True, True]


def test_no_sync_accumulates() -> None:
    def program(group: pycomm.Group, models: list[nn.Module]) -> list[Tensor]:
        model = pycomm.DataParallel(models[group.rank])
        for half in range(2):
            model.zero_grad(set_to_none=half == 0)
            before = group.stats().calls
            with model.no_sync():
                F.mse_loss(model(batch(group.rank, 0)[0]), batch(group.rank, 0)[1]).backward()
            assert group.stats().calls == before
            F.mse_loss(model(batch(group.rank, 1)[0]), batch(group.rank, 1)[1]).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    one = perceptron()
    for rank in range(2):
        for step in range(2):
            (F.mse_loss(one(batch(rank, step)[0]), batch(rank, step)[1]) / 2).backward()
    for result in run_ranks(2, program, replicas(2)):
        torch.testing.assert_close(result, [parameter.grad for parameter in one.parameters()])


class Branches(nn.Module):
    """A batch uses one of three branches; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.ModuleList(nn.Linear(16, 3) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branch[which](x)


def test_unused_parameters() -> None:
    def program(group: pycomm.Group, models: list[nn.Module]) -> list[Tensor | None]:
        model = pycomm.DataParallel(models[group.rank], find_unused_parameters=True, bucket_mb=1e-4)
        for step in range(3):
            model.zero_grad()
            x, y = batch(group.rank, step)
            F.mse_loss(model(x, group.rank), y).backward()
        return [parameter.grad for parameter in model.parameters()]

    one = seeded(Branches(), 0)
    results = run_ranks(2, program, [copy.deepcopy(one) for _ in range(2)])
    for rank in range(2):  # only the last step counts; a rank that did not use it contributes zero
        x, y = batch(rank, 2)
        (F.mse_loss(one(x, rank), y) / 2).backward()
    for result in results:
        assert result[4:] == [None, None]
        torch.testing.assert_close(result[:4], [p.grad for p in one.parameters()][:4])


def test_unused_parameter_is_named_and_no_rank_waits() -> None:
    def program(group: pycomm.Group, models: list[nn.Module]) -> str:
        model = pycomm.DataParallel(models[group.rank])
        x, y = batch(group.rank, 0)
        with pytest.raises(InvalidArgument) as raised:
            F.mse_loss(model(x, group.rank), y).backward()
        return str(raised.value)

    texts = run_ranks(2, program, replicas(2, Branches))
    assert "4 of 6 parameters got no gradient, the first is 'branch.1.weight'" in texts[0]
    assert "'branch.0.weight'" in texts[1]


@on_ranks(1)
def test_second_gradient_in_one_pass_is_rejected(group: pycomm.Group) -> None:
    """As checkpoints with use_reentrant do: backward inside backward."""
    model = pycomm.DataParallel(perceptron(), find_unused_parameters=True)
    x, y = batch(group.rank, 0)
    layer = model.module[4]

    def inner(_: Tensor) -> None:
        with torch.enable_grad():
            layer.weight.sum().backward()

    model.module[2].weight.register_hook(inner)
    with pytest.raises(InvalidArgument, match=r"'4\.weight' got a second gradient"):
        F.mse_loss(model(x), y).backward()


@pytest.mark.parametrize("batches", [(1, 4), (3, 0), (2, 2)])
def test_join_with_uneven_data(batches: tuple[int, int]) -> None:
    def program(group: pycomm.Group, models: list[nn.Module]) -> list[Tensor]:
        model = pycomm.DataParallel(models[group.rank], bucket_layers=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(batches[group.rank]):
                step_on(model, batch(group.rank, step), optimizer)
        return [*parameters(model), *(b.clone() for b in model.buffers())]

    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(16), perceptron())

    results = run_ranks(2, program, replicas(2, make))
    assert equal(*results)
    one = make()
    for step in range(max(batches)):  # a rank without data adds zero to the mean of two
        before = parameters(one)
        kept = buffers = copy.deepcopy(one.state_dict())
        gradients = [torch.zeros_like(p) for p in before]
        active = [rank for rank in range(2) if batches[rank] > step]
        source = active[-1]
        for rank in active:
            one.load_state_dict(buffers)
            one.zero_grad()
            F.mse_loss(one(batch(rank, step)[0]), batch(rank, step)[1]).backward()
            for total, parameter in zip(gradients, one.parameters(), strict=True):
                total.add_(parameter.grad / 2)
            if rank == source:
                kept = copy.deepcopy(one.state_dict())
        one.load_state_dict(kept)
        for parameter, total in zip(one.parameters(), gradients, strict=True):
            parameter.data.sub_(0.1 * total)
    torch.testing.assert_close(results[0][:8], parameters(one))


class Locked(torch.optim.SGD):
    """An optimizer whose state cannot be saved on rank 1, or cannot be loaded."""

    secret: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "secret": self.secret}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("secret", "message"), [(threading.Lock, "pickle"), (object, "Weights only load failed")]
)
def test_unserializable_state_raises_on_every_rank(secret: Any, message: str) -> None:
    def program(group: pycomm.Group, models: list[nn.Module]) -> str:
        model = pycomm.DataParallel(models[group.rank])
        optimizer = Locked(model.parameters(), lr=0.1)
        optimizer.secret = secret() if group.rank == 1 else None
        kind = Exception if group.rank == 1 else pycomm.errors.Error
        with pytest.raises(kind) as caught, model.join(optimizer):
            step_on(model, batch(group.rank, 0), optimizer)
        assert pycomm.all_reduce(torch.ones(1)).item() == 2  # the group still works
        return str(caught.value)

    other, own = run_ranks(2, program, replicas(2))
    assert message in own
    assert other.startswith("rank 1 could not send its value: ")
    assert message in other


def test_buffers_follow_rank_0() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(16), perceptron())

    def program(group: pycomm.Group, models: list[nn.Module], form: dict[str, Any]) -> list[Tensor]:
        model = pycomm.DataParallel(models[group.rank], **form)
        for step in range(3):
            F.mse_loss(model(batch(group.rank, step)[0]), batch(group.rank, step)[1]).backward()
        calls = group.stats().calls
        with torch.no_grad():
            model(batch(0, 0)[0])  # no exchange follows, so nothing is sent
        assert group.stats().calls == calls
        model(batch(0, 0)[0])
        return [b.clone() for b in model.buffers()]

    # the last forward used the same batch on both ranks, after rank 0's buffers arrived
    a, b = run_ranks(2, program, replicas(2, make), {})
    assert equal(a, b)
    a, b = run_ranks(2, program, replicas(2, make), {"broadcast_buffers": False})
    assert not equal(a, b)


@on_ranks(3)
def test_check_names_the_first_difference(group: pycomm.Group) -> None:
    model = perceptron()
    pycomm.DataParallel(model, init="check")
    if group.rank == 2:
        model[2].bias.data[3] += 1e-6
    with pytest.raises(Mismatch) as raised:
        pycomm.DataParallel(model, init="check")
    pycomm.DataParallel(model)  # the group stays usable, and this makes them equal
    pycomm.DataParallel(model, init="check")
    assert "rank 2 and rank 0 have different values for '2.bias'" in str(raised.value)


@on_ranks(2)
def test_models_of_other_shapes_are_rejected(group: pycomm.Group) -> None:
    with pytest.raises(Mismatch, match=r"shape.*'weight'"):
        pycomm.DataParallel(nn.Linear(3, 2 + group.rank))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x).mean(1))


def _words(rank: int, step: int) -> Tensor:
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 50, (4, 6), generator=made)


def test_sparse_gradients() -> None:
    def program(group: pycomm.Group, model: nn.Module) -> tuple[list[Tensor], int]:
        model = pycomm.DataParallel(copy.deepcopy(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for step in range(STEPS):
            step_on(model, (_words(group.rank, step), batch(group.rank, step)[1]), optimizer)
        gradient = model.module.words.weight.grad
        assert gradient.is_sparse
        return parameters(model), gradient._nnz()

    one = seeded(Words(), 0)
    results = run_ranks(3, program, one)
    assert all(equal(result, results[0][0]) for result, _ in results)
    assert results[0][1] < 50
    optimizer = torch.optim.SGD(one.parameters(), lr=0.3)
    for step in range(STEPS):
        x = torch.cat([_words(rank, step) for rank in range(3)])
        y = torch.cat([batch(rank, step)[1] for rank in range(3)])
        step_on(one, (x, y), optimizer)
    torch.testing.assert_close(results[0][0], parameters(one))


@on_ranks(2)
def test_state_dict_equals_the_module(group: pycomm.Group) -> None:
    module = perceptron(group.rank)
    model = pycomm.DataParallel(module)
    assert list(model.state_dict()) == list(module.state_dict())
    model.load_state_dict(perceptron(7).state_dict())
    assert equal(parameters(model), parameters(perceptron(7)))


@on_ranks(2)
def test_deleted_wrapper_holds_no_resources(group: pycomm.Group) -> None:
    module = perceptron()
    for _ in range(2):
        pycomm.DataParallel(module)
    model = pycomm.DataParallel(module)
    calls = group.stats().calls
    F.mse_loss(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
    assert group.stats().calls == calls + 1  # of the last wrapper alone


@on_ranks(2)
def test_lists_of_numpy_arrays_are_broadcast(group: pycomm.Group) -> None:
    mine = [np.full((2, 3), group.rank, "f4"), torch.full((3,), float(group.rank))]
    mine.append(np.full((4, 6), group.rank, "i8")[:, ::2])  # with strides
    pycomm.bcast_list_(mine, src=1)
    wanted = [[[1] * 3] * 2, [1] * 3, [[1] * 3] * 4]
    assert [array.tolist() for array in mine] == wanted


@on_ranks(1)
@pytest.mark.parametrize("item", [[1.0], np.frombuffer(b"01234567")])
def test_lists_to_broadcast_have_writable_arrays(group: pycomm.Group, item: Any) -> None:
    before = group.stats().calls
    with pytest.raises(InvalidArgument, match="tensors or writable NumPy arrays"):
        pycomm.bcast_list_([np.ones(2), item])
    assert group.stats().calls - before == 0


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_callback(op: str) -> None:
    def program(group: pycomm.Group, models: list[nn.Module]) -> list[Tensor]:
        model = models[group.rank]
        pycomm.bcast_list_(model.parameters())
        call = pycomm.make_allreduce_cb(op)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(call)
        for _ in range(2):
            model.zero_grad()
            F.mse_loss(model(batch(group.rank, 0)[0]), batch(group.rank, 0)[1]).backward()
        return [parameter.grad for parameter in model.parameters()]

    results = run_ranks(2, program, replicas(2))
    assert equal(*results)
    one = perceptron()
    for rank in range(2):
        loss = F.mse_loss(one(batch(rank, 0)[0]), batch(rank, 0)[1])
        (loss / 2 if op == "mean" else loss).backward()
    torch.testing.assert_close(results[0], [parameter.grad for parameter in one.parameters()])


@on_ranks(2)
@pytest.mark.parametrize("init", ["broadcast", "check"])
def test_model_on_another_device_is_rejected(group: pycomm.Group, init: str) -> None:
    with pytest.raises(Unsupported, match="'weight' is on meta"):
        pycomm.DataParallel(nn.Linear(2, 2, device="meta"), init=init)


@on_ranks(2)
def test_wrong_compression_type_raises_before_data_is_sent(group: pycomm.Group) -> None:
    """The module stays usable, and the group made no call."""
    model, before = nn.Linear(2, 2), group.stats().calls
    if group.rank == 0:
        with pytest.raises(InvalidArgument, match="compression"):
            pycomm.DataParallel(model, compression="dgc")
        assert group.stats().calls == before
    pycomm.DataParallel(model)


@on_ranks(1)
def test_bad_arguments(group: pycomm.Group) -> None:
    for wrong in ({"init": "hope"}, {"bucket_mb": -1}, {"lanes": 0}):
        with pytest.raises(InvalidArgument):
            pycomm.DataParallel(nn.Linear(2, 2), **wrong)
    with pytest.raises(InvalidArgument, match="no parameter"):
        pycomm.DataParallel(nn.Tanh())
    for name in ("bucket_cap_mb", "comm_buffer_size"):  # DDP's and Paddle's
        with pytest.raises(InvalidArgument, match="bucket_mb"):
            pycomm.DataParallel(nn.Linear(2, 2), **{name: -1})
    with pytest.raises(TypeError, match=r"DataParallel\(\) has no argument 'device_ids': move"):
        pycomm.DataParallel(nn.Linear(2, 2), device_ids=[0])
    for compression in ("dgc", 0.999, {"sparsity": 0.9}, pycomm.DGC, pycomm.dgc_hook, False):
        with pytest.raises(InvalidArgument, match=r"expected None or a DGC"):
            pycomm.DataParallel(nn.Linear(2, 2), compression=compression)
    with pytest.raises(InvalidArgument, match="got the class DGC"):
        pycomm.DataParallel(nn.Linear(2, 2), compression=pycomm.DGC)
    with pytest.raises(InvalidArgument):
        pycomm.make_allreduce_cb("max")
