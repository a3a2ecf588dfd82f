"""ShardedTraining: a new process gets its shard from the ranks that hold copies (HSDP).

Four ranks are processes, as 2 replicas x 2 shards. One is killed. The result is bitwise that of a
run without failures.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic_ranks import ElasticRun, die, until_broken, wait_until
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch_ranks import (
    in_processes,
    run_fixture,  # noqa: F401 - a fixture
)

import pycomm
from pycomm import Group, elastic, errors
from pycomm.elastic import sharded

LAST, DEATH = 6, 4  # steps
LIMIT_S = 180.0  # five processes import torch's FSDP
SHAPES = {"hsdp": (2, 2), "fsdp": (4,)}
NAMES = ("replicate", "shard")


@pytest.fixture
def port() -> Iterator[int]:
    """Of a store for torch's process groups, which no rank serves."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def form_torch(group: Group, port: int) -> None:
    """torch's default process group, with the ranks and the connections of `group`."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.PrefixStore(group.name, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("pycomm", store=store, rank=group.rank, world_size=group.size)


class Run:
    """A rank of the training, which dies in step DEATH if it is the victim."""

    def __init__(self, init: Any, victim: int, moment: str, port: int, shape: str) -> None:
        torch.set_num_threads(1)
        self.group, self.port, self.shape = init(), port, SHAPES[shape]
        self.new = self.group.rank in self.group.joined
        self.dies = self.group.rank == victim and not self.new
        self.moment, self.built = moment, 0

    def build(self, group: Group) -> Any:
        self.built += 1
        form_torch(group, self.port)
        mesh = init_device_mesh("cpu", self.shape, mesh_dim_names=NAMES[-len(self.shape) :])
        torch.manual_seed(self.built + 10 * self.new)  # the others' content is not that of build()
        model = Net()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        if self.dies and self.moment == "backward":  # in the middle of the pass
            model[0].register_full_backward_pre_hook(lambda *_: self.die_in(DEATH))
        return model, optimizer, scheduler

    def die_in(self, step: int) -> None:
        if self.dies and self.training.step_count == step:
            die()

    def pass_barrier(self, **options: Any) -> None:
        """After the barrier of step DEATH the victim dies. The rank with a copy of its shard gets
        an error, while the others complete the step."""
        pycomm.barrier(**options)
        self.die_in(DEATH)
        if self.group.rank == 1 and not self.new and self.training.step_count == DEATH:
            raise until_broken(self.group)

    def complete_step(self, victims: tuple[int, ...]) -> Any:
        """All ranks complete a step; then the victims die, and the others get an error. Returns
        their content."""
        self.training.model(torch.ones(2, 5)).square().mean().backward()
        self.training.step()
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False)
        if self.group.rank in victims:
            wait_until(lambda: store.add("completed", 0) == self.group.size - len(victims))
            die()
        store.add("completed", 1)
        before = contents(self.training)
        with pytest.raises((errors.PeerLost, errors.GroupBroken)):
            self.training.step()
        return before

    def train(self) -> Any:
        if self.moment == "barrier":
            vars(sharded)["collectives"] = SimpleNamespace(barrier=self.pass_barrier)
        self.training = training = elastic.ShardedTraining(self.build)
        waiting, lost, buffers = self.new, [], b""
        while waiting or training.step_count < LAST:
            try:
                if waiting:
                    lost, waiting = training.replace().lost, False
                    buffers = b"".join(x.numpy().tobytes() for x in training.model.buffers())
                data = torch.Generator().manual_seed(10 * training.step_count + self.group.rank)
                training.optimizer.zero_grad()
                training.model(torch.randn(8, 5, generator=data)).square().mean().backward()
                if self.moment == "step":
                    self.die_in(DEATH)
                training.step()
                training.others[0].step()
            except (errors.PeerLost, errors.GroupBroken):  # a rank was killed
                waiting = True
        return lost, self.built, contents(training), buffers


def contents(training: elastic.ShardedTraining) -> Any:
    """The shards of this rank and what is not sharded."""
    model, optimizer = training.model, training.optimizer
    moments = [
        one[key].to_local() for one in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
    ]
    parameters = [p.to_local().detach() for p in model.parameters()]  # type: ignore[attr-defined]  # DTensors
    steps = [one["step"] for one in optimizer.state.values()]
    tensors = [*parameters, *moments, *steps]
    return [x.numpy().tobytes() for x in tensors], training.others[0].state_dict()


def train(*given: Any) -> Any:
    return Run(*given).train()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By rank: its shards without a failure."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ElasticRun(
        str(tmp_path_factory.mktemp("undisturbed") / "group"), 4, limit_s=LIMIT_S
    ) as run:
        run.start_ranks(train, -1, "step", store.port, "hsdp")
        results = run.wait_for()
    return [results[f"rank {rank}"][2] for rank in range(4)]


@pytest.mark.parametrize(("victim", "moment"), [(3, "backward"), (0, "step"), (3, "barrier")])
def test_a_run_ends_as_if_no_shard_was_lost(
    tmp_path: Path, victim: int, moment: str, port: int, undisturbed: Any
) -> None:
    with ElasticRun(str(tmp_path / "group"), 4, limit_s=LIMIT_S) as run:
        run.start_ranks(train, victim, moment, port, "hsdp")
        run.start_joiner("new", train, -1, moment, port, "hsdp")
        results = run.wait_for()
    assert results.pop(f"rank {victim}") is None
    results[f"rank {victim}"] = results.pop("new")
    for rank, wanted in enumerate(undisturbed):
        lost, built, found, _ = results[f"rank {rank}"]
        assert (lost, built) == ([victim], 1 if rank == victim else 2)
        assert found == wanted, rank
    *_, buffers = results.pop(f"rank {victim}")
    assert buffers in [others for *_, others in results.values()]
    assert buffers != b"".join(x.numpy().tobytes() for x in Net().buffers())


def lose_shard(*given: Any) -> Any:
    """Without replicas, or with a new mesh that shards otherwise."""
    run = Run(*given)
    run.training = training = elastic.ShardedTraining(run.build)
    if run.new:
        with pytest.raises(errors.InvalidArgument, match=r"call replace\(\) first"):
            training.step()
    else:
        before, model = run.complete_step((2,)), training.model
    if run.moment == "reshape":
        run.shape = SHAPES["fsdp"]
    with pytest.raises(errors.Unsupported, match=r"torch\.distributed\.checkpoint"):
        training.replace()
    if not run.new:
        assert contents(training) == before
        assert training.model is model
    pycomm.barrier()
    return run.built


@pytest.mark.parametrize(("shape", "moment"), [("fsdp", "lose"), ("hsdp", "reshape")])
def test_a_lost_shard_changes_nothing(tmp_path: Path, shape: str, moment: str, port: int) -> None:
    with ElasticRun(str(tmp_path / "group"), 4, limit_s=LIMIT_S) as run:
        run.start_ranks(lose_shard, 2, moment, port, shape)
        run.start_joiner("new", lose_shard, -1, moment, port, shape)
        results = run.wait_for()
    again = moment == "reshape"  # build() was called, and its result is not used
    assert results == {"rank 2": None, "new": again} | {
        f"rank {rank}": 1 + again for rank in (0, 1, 3)
    }


def lose_replica(*given: Any) -> Any:
    """Ranks 2 and 3 are not replaced: a mesh of one replica is left."""
    run = Run(*given)
    run.training = training = elastic.ShardedTraining(run.build)
    before = run.complete_step((2, 3))
    run.shape = (1, 2)
    lost: list[int] = []
    while not lost:
        with contextlib.suppress(errors.PeerLost):  # the second death
            lost = training.replace(wait_s=0).lost
    assert contents(training) == before
    training.model(torch.ones(2, 5)).square().mean().backward()
    training.step()
    return lost, training.step_count


def test_the_replica_that_is_left_continues(tmp_path: Path, port: int) -> None:
    with ElasticRun(str(tmp_path / "group"), 4, limit_s=LIMIT_S) as run:
        run.start_ranks(lose_replica, -1, "", port, "hsdp")
        results = run.wait_for()
    left = ([2, 3], 2)
    assert results == {"rank 0": left, "rank 1": left, "rank 2": None, "rank 3": None}


@in_processes(2)
def test_copies_that_differ_at_the_start_are_named() -> None:
    def build(_: Group) -> Any:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
        torch.manual_seed(dist.get_rank())
        model = fully_shard(Net(), mesh=mesh)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(errors.Mismatch, match=r"tensors of ranks \[1\] differ"):
        elastic.ShardedTraining(build)
    pycomm.barrier()


@in_processes(1)
def test_an_optimizer_with_shards_on_one_rank_is_refused() -> None:
    model = Net()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    parallel = pycomm.DataParallel(model)
    local = pycomm.LocalSGD(model, zero)
    for method in (
        *(lambda: parallel.replace(zero), lambda: parallel.shrink(zero), local.replace),
        lambda: elastic.ShardedTraining(lambda _: (model, zero)),
    ):
        with pytest.raises(errors.Unsupported, match="ZeroRedundancyOptimizer"):
            method()
    pycomm.barrier()  # nothing was changed
