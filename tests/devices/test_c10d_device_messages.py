"""Messages of the backend "pycomm" between tensors on devices (tests/support/torch_devices.py)."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_devices import MARKS, run_fixture, share_a_device  # noqa: F401 - the fixture "run"
from torch_ranks import Run, in_processes

from pycomm import errors

pytestmark = MARKS


@in_processes(3)
@pytest.mark.parametrize("shared", [False, True], ids=["separate devices", "one device"])
def test_messages(at: Any, shared: bool) -> None:
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


@in_processes(4)
@pytest.mark.parametrize("shared", [False, True], ids=["separate devices", "one device"])
def test_batch_is_one_group(at: Any, shared: bool) -> None:
    """Returns NCCL's counts of the first ring shift and of a later one."""
    if shared:
        share_a_device(at)
    group = dist.new_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    x = torch.full((1000,), float(rank), device=at.device)
    dist.all_reduce(x.clone(), group=group)  # the communicator of all ranks
    x.cpu()
    at.counts()
    counts = []
    for turn in range(3):
        y = torch.zeros(1000, device=at.device)
        ops = [
            dist.P2POp(dist.irecv, y, left, group, tag=turn),
            dist.P2POp(dist.isend, x + turn, right, group, tag=turn),
        ]
        for work in dist.batch_isend_irecv(ops if rank % 2 else ops[::-1]):
            work.wait()
        assert (y.cpu() == left + turn).all()
        counts.append(at.counts())
    first, later = counts[0], counts[2]
    messages = 0 if shared else 1
    for counts, groups in ((first, 2 * messages), (later, messages)):
        assert (counts["groups"], counts["sends"], counts["receives"]) == (
            groups,
            messages,
            messages,
        )


@in_processes(2)
@pytest.mark.parametrize("connected", [False, True], ids=["first call", "after a collective"])
@pytest.mark.parametrize("shared", [False, True], ids=["separate devices", "one device"])
def test_batches_in_another_order(at: Any, shared: bool, connected: bool) -> None:
    """Two messages of one direction: NCCL matches them without tags."""
    if shared:
        share_a_device(at)
    group = dist.new_group()
    rank = dist.get_rank()
    if connected:
        dist.all_reduce(torch.zeros(1, device=at.device), group=group)
    for turn in range(4):
        x, y = (torch.full((1000,), 10.0 * rank + i, device=at.device) for i in range(2))
        op = dist.irecv if rank else dist.isend
        ops = [dist.P2POp(op, t, 1 - rank, group, tag=tag) for tag, t in ((5, x), (7, y))]
        if rank and turn % 2:  # single calls
            dist.recv(y, 0, group, tag=7)
            dist.recv(x, 0, group, tag=5)
        else:
            for work in dist.batch_isend_irecv(ops[::-1] if rank else ops):
                work.wait()
        assert (x.cpu() == 0).all()
        assert (y.cpu() == 1).all()


def _mismatch_in_a_batch(at: Any, shared: bool) -> str:
    """The second of two messages does not fit; the first is received."""
    if shared:
        share_a_device(at)
    group = dist.new_group()
    rank = dist.get_rank()
    x, y = (torch.full((1000,), 10.0 * rank + i, device=at.device) for i in range(2))
    text = ""
    for turn in range(3):  # two ranks connect, then all of them, then nothing has to be connected
        if rank < 2:
            wrong = y[:500] if rank else y
            op = dist.irecv if rank else dist.isend
            ops = [
                dist.P2POp(op, x, 1 - rank, group, tag=1),
                dist.P2POp(op, wrong, 1 - rank, group, tag=2),
            ]
            with pytest.raises(errors.Mismatch, match="no data was sent") as caught:
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
            text = str(caught.value)
            last = torch.zeros(1, device=at.device)  # on the stream of the first message, after it
            dist.recv(last, 0, group) if rank else dist.send(last, 1, group)
        z = torch.ones(10, device=at.device)
        dist.all_reduce(z, group=group)
        assert (z.cpu() == dist.get_world_size()).all()
        if rank < 2:
            assert (x.cpu() == turn).all()
            assert (y.cpu() == 10 * rank + 1).all()
        if rank == 0:
            x += 1
    return text


@pytest.mark.parametrize("shared", [False, True], ids=["separate devices", "one device"])
def test_mismatch_in_a_batch_drops_one_message(run: Run, shared: bool) -> None:
    for text in run(3, _mismatch_in_a_batch, shared)[:2]:
        assert "send(float32, count 1000, tag 2" in text
        assert "recv(float32, count 500, tag 2" in text
