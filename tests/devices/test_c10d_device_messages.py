"""Messages of the backend "pycomm" between tensors on devices (tests/support/torch_devices.py)."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_devices import MARKS, run_fixture, share_a_device  # noqa: F401 - the fixture "run"
from torch_ranks import Run

from pycomm import errors

pytestmark = MARKS


def _messages(at: Any, shared: bool) -> None:
    if shared:
        share_a_device(at)
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size

    def of(r: int) -> torch.Tensor:
        return torch.full((1000,), float(r), device=at.device)

    def is_(found: torch.Tensor, r: int) -> None:
        assert (found.cpu() == r).all()

    y = torch.zeros(10, 2, dtype=torch.int32, device=at.device)[:, 1]  # not contiguous
    z = torch.full((10,), rank, dtype=torch.int32).to(at.device)
    if rank == 0:
        dist.recv(y, left)
        dist.send(z, right)
    else:
        dist.send(z, right)
        dist.recv(y, left)
    is_(y, left)
    y, z, mine = of(9), of(9), of(rank)
    ops = [
        dist.P2POp(dist.irecv, z, right, tag=3),
        dist.P2POp(dist.isend, mine, left, tag=3),
        dist.P2POp(dist.isend, mine, right),
        dist.P2POp(dist.irecv, y, left),
    ]
    y.cpu()  # all earlier work is done
    go_on = at.delay()
    for work in dist.batch_isend_irecv(ops if rank % 2 else ops[::-1]):
        work.wait()  # does not wait for the device
        assert not work.is_completed()
    go_on()
    is_(y, left)
    is_(z, right)
    if rank == 0:
        got = [of(9) for _ in range(1, size)]
        who = [dist.recv(got[0])]
        for x in got[1:]:
            work = dist.irecv(x)
            work.wait()
            who.append(work._source_rank())
        assert sorted(who) == list(range(1, size))
        for x, r in zip(got, who, strict=True):
            is_(x, r)
    else:
        dist.isend(of(rank), 0).wait()
    x = of(rank)
    if rank < 2:
        with pytest.raises(errors.Mismatch, match="no data was sent"):
            dist.recv(x[:500], 0) if rank else dist.send(x, 1)
        is_(x, rank)
    dist.all_reduce(x)
    is_(x, sum(range(size)))


@pytest.mark.parametrize("shared", [False, True], ids=["separate devices", "one device"])
def test_messages(run: Run, shared: bool) -> None:
    run(3, _messages, shared)


def _first_call_disagrees(at: Any) -> None:
    group = dist.new_group()
    x = torch.full((10,), 1.0 + dist.get_rank())
    on_device = x.to(at.device)
    with pytest.raises(errors.Mismatch, match="no data was sent"):
        if dist.get_rank() == 0:
            dist.isend(on_device, 1, group).wait()
        else:
            dist.recv(x, 0, group)
    dist.all_reduce(on_device, group=group)
    assert (on_device.cpu() == 3).all()


def test_first_message_against_an_end_on_the_host_is_a_mismatch(run: Run) -> None:
    run(2, _first_call_disagrees)


def _first_of_two(at: Any, shared: bool) -> None:
    if shared:
        share_a_device(at)
    group = dist.new_group()
    x = torch.full((10,), float(dist.get_rank()), device=at.device)
    if dist.get_rank() < 2:
        dist.recv(x, 0, group) if dist.get_rank() else dist.send(x, 1, group)
        assert (x.cpu() == 0).all()
    dist.barrier()  # of the tensors in host memory
    dist.all_reduce(x, group=group)
    assert (x.cpu() == 2).all()


@pytest.mark.parametrize("shared", [False, True], ids=["separate devices", "one device"])
def test_first_message_connects_its_two_ranks_only(run: Run, shared: bool) -> None:
    run(3, _first_of_two, shared)
