"""pycomm in place of gloo for tensors on a device that no compiled module of pycomm serves: copies
through host memory.

Torch's device is the emulated GPU of support/torch_devices.py, whose module pycomm does not get.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_devices import MARKS, POOLS, check_coalesced, check_verbs, on_device, train
from torch_ranks import IN_PLACE, Run, in_processes

from pycomm import errors, torch_backend

pytestmark = MARKS
BACKEND = "cpu:gloo,privateuseone:gloo"


@pytest.fixture(name="run")
def run_fixture(tmp_path: Path, no_leaks: Any) -> Run:
    """As that of torch_devices.py."""
    return lambda size, fn, *args: POOLS.of(size, no_leaks).run(
        tmp_path, BACKEND + IN_PLACE, on_device, fn, *args
    )


@in_processes(2, 3)
def test_verbs(at: Any) -> None:
    check_verbs(at)
    assert torch_backend.stats()["groups_in_place_of_gloo"] == 1
    dist.group.WORLD._get_backend(at.device).eager_connect_single_device(at.device)  # nothing to do


@in_processes(2)
def test_calls_begin_after_the_work_on_the_stream(at: Any) -> None:
    """Also those that write only: earlier work may read the memory."""
    rank = dist.get_rank()
    for turn in range(5):
        x, y = (torch.zeros(1000, device=at.device) for _ in range(2))
        x.copy_(torch.full((1000,), float(turn + 1)))
        works = [dist.all_reduce(x, async_op=True)]
        y.copy_(x)
        works.append(dist.broadcast(y, 1, async_op=True))
        for work in works:
            work.wait()
        assert (x.cpu() == 2 * (turn + 1)).all()
        before, kept = torch.full((10,), float(rank), device=at.device), torch.zeros(10)
        read = kept.to(at.device)
        read.copy_(before)
        dist.recv(before, 1) if rank == 0 else dist.send(before, 0)
        assert (read.cpu() == rank).all()
        assert (before.cpu() == 1).all()


@in_processes(2)
def test_lists_that_overlap_and_parts_of_one_storage(at: Any) -> None:
    size = dist.get_world_size()
    whole = torch.zeros(4 * size + 3, device=at.device)
    parts = list(whole[1 : 4 * size + 1].split(4))  # adjacent
    dist.all_gather(parts, torch.full((4,), dist.get_rank() + 1.0, device=at.device))
    wanted = [0.0, *(float(r + 1) for r in range(size) for _ in range(4)), 0.0, 0.0]
    assert whole.tolist() == wanted
    x = torch.ones(6, device=at.device)
    dist.all_reduce_coalesced([x[:4], x[2:]])
    assert x.tolist() == [2, 2, 2, 2, 2, 2]
    z = torch.zeros(0, device=at.device)
    dist.all_reduce(z)


@in_processes(2)
def test_batches(at: Any) -> None:
    rank = dist.get_rank()
    check_coalesced(at)
    y = torch.zeros(5, device=at.device)
    ops = [
        dist.P2POp(dist.isend, torch.full((5,), i + 1.0, device=at.device), 1 - rank)
        for i in range(2)
    ]
    ops += [dist.P2POp(dist.irecv, y, 1 - rank) for _ in range(2)]  # the last one stays
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (y.cpu() == 2).all()


@in_processes(2)
def test_mismatch_changes_no_tensor(at: Any) -> None:
    x = torch.ones(10 + dist.get_rank(), device=at.device)
    with pytest.raises(errors.Mismatch, match="no array was changed"):
        dist.all_reduce(x)
    with pytest.raises(errors.Mismatch):
        dist.all_reduce(x, async_op=True).wait()
    assert (x.cpu() == 1).all()


@in_processes(2)
def test_ddp_trains_as_on_the_cpu(at: Any) -> None:
    for there, here in zip(train(at.device), train("cpu"), strict=True):
        torch.testing.assert_close(there, here)
