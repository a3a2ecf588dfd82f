"""Batches of messages and the coalescing manager: after errors in their bodies, and their progress.

The functions `_...` run in the processes of torch_ranks.py.
"""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

# pytest finds the fixtures by name, so that they look unused.
from torch_ranks import Run, in_processes, run_fixture, same  # noqa: F401 - fixtures

from pycomm.errors import InvalidArgument, Unsupported


def _exchange() -> None:
    """A batch that sends this rank's number to the next rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    got = torch.zeros(2)
    ops = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % size),
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(got, torch.full((2,), float((rank - 1) % size)), "the batch")


def _calls_work(group: dist.ProcessGroup | None = None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), float(rank + 1))
    dist.all_reduce(x, group=group)
    same(x, torch.full((4,), size * (size + 1) / 2), "all_reduce")
    y = torch.full((4,), float(rank))
    dist.broadcast(y, size - 1, group=group)
    same(y, torch.full((4,), size - 1.0), "broadcast")
    dist.barrier(group=group)
    if size > 1:
        _exchange()


def _post(tensor: torch.Tensor) -> None:
    """A batch whose second message has this tensor."""
    peer = 1 - dist.get_rank()
    ops = [
        dist.P2POp(dist.isend, torch.ones(4), peer),
        dist.P2POp(dist.irecv, tensor, peer),
    ]
    dist.batch_isend_irecv(ops)


@in_processes(2)
def test_calls_after_an_error_in_a_batch() -> None:
    sparse = torch.eye(3).to_sparse()
    for tensor, error in (
        (torch.zeros(1).expand(4), InvalidArgument),
        (sparse, Exception),
        (torch.zeros(4, dtype=torch.cfloat).conj(), Exception),
    ):
        with pytest.raises(error):
            _post(tensor)
        _calls_work()


@in_processes(1, 2)
def test_calls_after_an_error_in_the_coalescing_manager() -> None:
    manager = dist.distributed_c10d._coalescing_manager
    group = dist.new_group()
    for device in (None, torch.device("cpu")):
        for raised in (KeyboardInterrupt, ValueError):
            with pytest.raises(raised), manager(group, device):
                dist.all_reduce(torch.ones(3), group=group)
                raise raised
            _calls_work(group)
            _calls_work()
    with pytest.raises(RuntimeError, match="mixed types"), manager(group, torch.device("cpu")):
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_gather_into_tensor(torch.ones(dist.get_world_size()), torch.ones(1), group=group)
    _calls_work(group)


@in_processes(2)
def test_a_manager_inside_another_leaves_it_as_it_was() -> None:
    manager = dist.distributed_c10d._coalescing_manager
    x = torch.ones(3)
    with manager():
        dist.all_reduce(x)
        with pytest.raises(ValueError, match="non-empty"), manager():
            pass
    same(x, torch.full((3,), float(dist.get_world_size())), "the outer manager's call")


def _post_both(works: list[dist.Work], size: int) -> Callable[[], None]:
    rank = dist.get_rank()
    got, sent = torch.zeros(size), torch.full((size,), rank + 1.0)
    ops = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    works += dist.batch_isend_irecv(ops)
    return lambda: same(got, torch.full((size,), 2.0 - rank), "received")


def _progress() -> float:
    """Seconds of batches that are waited for, polled, or followed by another call."""
    other = dist.new_group()
    dist.barrier()
    start = time.monotonic()
    for size in (4, 1 << 20):
        for how in ("wait", "poll", "call", "call of another group"):
            works: list[dist.Work] = []
            check = _post_both(works, size)
            if how.startswith("call"):
                dist.all_reduce(torch.ones(2), group=None if how == "call" else other)
            for work in works:
                while how == "poll" and not work.is_completed():
                    time.sleep(0)  # polls, and lets the other rank run
                work.wait()
            check()
    return time.monotonic() - start


def test_a_batch_progresses_without_a_heartbeat(run: Run) -> None:
    """A batch that waits for the next heartbeat takes 2 s."""
    assert max(run(2, _progress)) < 4.0


@in_processes(2)
def test_premul_sum_of_integers_is_exact() -> None:
    size, premul_sum = dist.get_world_size(), _make_nccl_premul_sum
    for dtype, value, factor in (
        (torch.int32, 2**24 + 1, 3.0),
        (torch.int32, 2**30 - 1, 2.0),
        (torch.int64, 2**53 + 1, 2.0),
        (torch.int64, 2**40 + 1, torch.tensor([-3])),
        (torch.uint8, 255, 2.0),
        (torch.float32, 3, 0.5),
    ):
        x = torch.tensor([value], dtype=dtype)
        expected = torch.tensor([0], dtype=dtype)
        for _ in range(size):
            expected += (x * factor).to(dtype) if dtype.is_floating_point else x * int(factor)
        dist.all_reduce(x, premul_sum(factor))
        same(x, expected, f"{dtype} times {factor}")
    for dtype, factor in (
        (torch.int32, 0.5),
        (torch.int32, torch.tensor([2.0])),
        (torch.bool, 2.0),
    ):
        x = torch.ones(2, dtype=dtype)
        with pytest.raises(Unsupported, match="integer as factor"):
            dist.all_reduce(x, premul_sum(factor))
        same(x, torch.ones(2, dtype=dtype), "unchanged")


@in_processes(2)
def test_a_tensor_larger_than_its_storage_is_refused() -> None:
    for room in (0, 64):
        x = torch.ones(10_000)
        x.untyped_storage().resize_(room)
        for call in (
            dist.all_reduce,
            lambda x: dist.broadcast(x, 0),
            lambda x: dist.all_gather_into_tensor(torch.empty(x.numel() * 2), x),
            lambda x: dist.isend(x, 1 - dist.get_rank()),
        ):
            with pytest.raises(InvalidArgument, match="has a storage of"):
                call(x)
    _calls_work()
