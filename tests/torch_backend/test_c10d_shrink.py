"""`torch.distributed.shrink_group` on the backend "pycomm", also after a rank died."""

import multiprocessing
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# pytest finds the fixtures by name, so that they look unused.
from torch_ranks import LIMIT_S, Run, in_processes, run_fixture  # noqa: F401 - a fixture

import pycomm
from pycomm.errors import Error, GroupBroken

CPU = torch.device("cpu")
ABORT = dist.distributed_c10d.SHRINK_ABORT


def _expect_sum(group: dist.ProcessGroup | None, mine: int, ranks: list[int]) -> None:
    x = torch.full((1000,), float(mine))
    dist.all_reduce(x, group=group)
    assert (x == sum(ranks)).all()


@in_processes(4)
@pytest.mark.parametrize("flags", [0, ABORT])
@pytest.mark.parametrize("starts_with", ["torch", "pycomm"])
def test_the_default_group_shrinks(starts_with: str, flags: int) -> None:
    """Ranks 0 and 2 of 4 continue, renumbered; pycomm's own calls use torch's new group."""
    rank = dist.get_rank()
    if starts_with == "pycomm":
        pycomm.init()
    before = dist.group.WORLD
    limit = before._get_backend(CPU).options._timeout
    if rank % 2 == 1:
        return
    group = dist.shrink_group([1, 3], shrink_flags=flags)
    assert group is dist.group.WORLD
    assert (dist.get_rank(), dist.get_world_size()) == (rank // 2, 2)
    assert group._get_backend(CPU).options._timeout == limit
    _expect_sum(None, rank, [0, 2])
    assert pycomm.default_group.default().ranks == [0, 2]
    y = torch.full((10,), float(rank))
    pycomm.all_reduce(y)
    assert (y == 2).all()
    if rank == 2:
        return
    dist.shrink_group([1])
    assert dist.get_world_size() == 1
    _expect_sum(None, 7, [7])


@in_processes(4)
@pytest.mark.parametrize("way", ["new", "split"])
def test_a_subgroup_shrinks(way: str) -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    members = [1, 2, 3]
    if way == "split":
        part = world.split_group(members, timeout=timedelta(seconds=30))
    else:
        part = dist.new_group(members)
    if rank in (1, 3):
        place = members.index(rank)
        assert part.rank() == place
        backend = part._get_backend(CPU).shrink([1])
        assert (backend.rank(), backend.size()) == (place // 2, 2)
        x = torch.full((1000,), float(rank))
        backend.allreduce([x], dist.AllreduceOptions()).wait()
        assert (x == 4).all()
    _expect_sum(world, rank, [0, 1, 2, 3])  # the default group is not affected
    assert pycomm.default_group.default().size == 4


def _lose_rank(rank: int, path: Path, answers: "multiprocessing.SimpleQueue[object]") -> None:
    limit = timedelta(seconds=60)
    dist.init_process_group("pycomm", f"file://{path}", rank=rank, world_size=3, timeout=limit)
    _expect_sum(None, rank, [0, 1, 2])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        _expect_sum(None, rank, [0, 1, 2])
    except Error as error:  # checked below
        lost = str(error)
    dist.shrink_group([1], shrink_flags=ABORT)
    _expect_sum(None, rank, [0, 2])
    answers.put((rank, "rank 1" in lost, dist.get_world_size()))
    dist.destroy_process_group()


def test_survivors_shrink_the_group_of_a_dead_rank(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    processes = [
        context.Process(target=_lose_rank, args=(rank, tmp_path / "store", answers), daemon=True)
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0]
    assert sorted([answers.get(), answers.get()]) == [(0, True, 2), (2, True, 2)]


@in_processes(3)
def test_exclusions_that_differ_form_no_group() -> None:
    rank = dist.get_rank()
    backend = dist.group.WORLD._get_backend(CPU)
    backend.options._timeout = timedelta(seconds=1)
    backend.set_timeout(timedelta(seconds=1))
    if rank < 2:
        with pytest.raises(Error, match=r'"0-[02]" did not form .* did not join: 1$'):
            backend.shrink([2] if rank == 0 else [0], ABORT)
        with pytest.raises(GroupBroken, match="called abort"):
            dist.all_reduce(torch.ones(1))
