"""The backend "pycomm" for tensors on devices: the streams, futures and errors of a call.

Torch's device is an emulated GPU with a fake NCCL (support/torch_devices.py), which shows a missing
order between operations. The code of CUDA builds of torch has not run.
"""

import copy
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_devices import (
    MARKS,
    check_coalesced,
    check_verbs,
    run_fixture,  # noqa: F401 - the fixture "run"
    share_a_device,
    train,
)
from torch_ranks import Run, in_processes

import pycomm
from pycomm import errors, torch_backend
from pycomm._core_api import device_groups

pytestmark = MARKS


@pytest.mark.parametrize("size", [2, 3])
def test_verbs(run: Run, size: int) -> None:
    run(size, check_verbs)


@in_processes(2)
def test_verbs_of_ranks_that_share_a_device(at: Any) -> None:
    share_a_device(at)
    check_verbs(at)
    assert at.counts()["groups"] == 0
    x = torch.ones(1000, device=at.device)
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda f: f.value()[0].clone())
    assert (doubled.wait().cpu() == dist.get_world_size()).all()


@in_processes(2)
def test_a_wait_orders_the_stream_that_is_current_then(at: Any) -> None:
    x = torch.zeros(1000, device=at.device)
    x.copy_(torch.ones(1000))
    work = dist.all_reduce(x, async_op=True)
    before = at.stream(3)
    work.wait()  # orders stream 3 alone
    y = torch.empty_like(x)
    y.copy_(x)
    assert (y.cpu() == dist.get_world_size()).all()
    at.stream(before)


@in_processes(2)
def test_results_of_other_layouts_are_ordered_with_the_stream(at: Any) -> None:
    """Results for a noncontiguous layout are copied there after the call."""
    x = torch.zeros(100, 2, device=at.device)
    for turn in range(5):
        x.copy_(torch.full((100, 2), float(turn)))
        works = [dist.all_reduce(x[:, i], async_op=True) for i in range(2)]
        for work in works:
            work.wait()
        y = torch.empty_like(x)
        y.copy_(x)
        assert (y.cpu() == turn * dist.get_world_size()).all()


@in_processes(2)
@pytest.mark.parametrize("async_op", [False, True])
def test_own_calls_copy_arrays_of_other_layouts(at: Any, async_op: bool) -> None:
    pycomm.init()
    n, me = pycomm.size(), pycomm.rank()
    rooms: list[Any] = []

    def odd(x: Any) -> Any:
        rooms.append(torch.full((*x.shape, 3), 99.0, device=at.device))
        rooms[-1][..., 1].copy_(x)
        return rooms[-1][..., 1]

    each = [torch.arange(12.0).view(3, 4) + 100 * rank for rank in range(n)]
    whole, rows = torch.stack(each), [torch.stack([x + 7 * i for i in range(n)]) for x in each]
    mine, mine_rows = each[me], rows[me]
    to_all = torch.stack([row[me] for row in rows])
    calls = [
        (pycomm.all_reduce(odd(mine), async_op=async_op), sum(each)),
        (pycomm.broadcast(odd(mine), 1, async_op=async_op), each[1]),
        (pycomm.all_gather(odd(mine), odd(0 * whole), async_op=async_op), whole),
        (pycomm.reduce_scatter(odd(mine_rows), out=odd(mine), async_op=async_op), to_all.sum(0)),
        (pycomm.all_to_all(odd(mine_rows), odd(mine_rows), async_op=async_op), to_all),
        (pycomm.scatter(odd(mine_rows), 1, odd(mine), async_op=async_op), rows[1][me]),
        (pycomm.reduce(odd(mine), 1, async_op=async_op), sum(each) if me == 1 else mine),
    ]
    for call, wanted in calls:
        assert torch.equal((call.result() if async_op else call).cpu(), wanted)
    if me == 0:
        pycomm.send(odd(mine), 1)
    else:
        assert torch.equal(pycomm.recv(odd(mine), 0).cpu(), each[0])
    assert all((room[..., ::2].cpu() == 99.0).all() for room in rooms)
    with pytest.raises(errors.InvalidArgument, match="elements of the array share memory"):
        pycomm.all_reduce(torch.zeros(1, device=at.device).expand(5))


@in_processes(2)
def test_futures_carry_streams(at: Any) -> None:
    size = dist.get_world_size()
    x = torch.zeros(1000, device=at.device)
    for turn in range(5):
        x.cpu()
        go_on = at.delay()
        x.copy_(torch.full((1000,), float(turn)))
        future = dist.all_reduce(x, async_op=True).get_future()
        doubled = future.then(lambda f: f.value()[0].clone())
        (value,) = future.wait()
        assert value.data_ptr() == x.data_ptr()
        y = torch.empty_like(x)
        y.copy_(value)
        go_on()
        assert (y.cpu() == turn * size).all()
        assert (doubled.wait().cpu() == turn * size).all()


@in_processes(2)
def test_each_group_has_its_own_completion_stream(at: Any) -> None:
    """A call of one group waits; those of more groups than torch's pool has streams complete."""
    groups = [dist.new_group() for _ in range(9)]
    xs = [torch.ones(3, device=at.device) for _ in groups]
    for x, group in zip(xs, groups, strict=True):
        dist.all_reduce(x, group=group)
        x.cpu()
    before = at.stream(3)
    go_on = at.delay()
    waiting = dist.all_reduce(xs[0], group=groups[0], async_op=True)
    at.stream(4)
    works = [
        dist.all_reduce(x, group=group, async_op=True)
        for x, group in zip(xs[1:], groups[1:], strict=True)
    ]
    deadline = time.monotonic() + 60
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < deadline, "a call waits for one of another group"
    assert not waiting.is_completed()
    go_on()
    at.stream(before)


@in_processes(2)
def test_tensors_are_kept_until_the_device_finishes_or_a_stream_waits(at: Any) -> None:
    x = torch.ones(12345, device=at.device)
    dist.all_reduce(x)
    x.cpu()

    def address() -> int:
        return torch.empty(12345, device=at.device).data_ptr()

    first = x.data_ptr()
    go_on = at.delay()
    dist.all_reduce(x, async_op=True)
    del x
    gc.collect()
    others = [torch.empty(12345, device=at.device) for _ in range(3)]
    assert first not in [other.data_ptr() for other in others]
    go_on()
    others[0].cpu()
    deadline = time.monotonic() + 60
    while address() != first:  # a later call drops the reference once the device is done
        assert time.monotonic() < deadline
        dist.all_reduce(others[0], async_op=True).wait()
        others[0].cpu()
    x = torch.empty(12345, device=at.device)
    assert x.data_ptr() == first
    go_on = at.delay()
    work = dist.all_reduce(x, async_op=True)
    work.wait()  # later use of the memory on this stream is ordered after the call
    del x, work
    gc.collect()
    assert address() == first
    go_on()
    dist.barrier()


@in_processes(2)
def test_a_wait_with_a_limit_waits_for_the_device(at: Any) -> None:
    x = torch.ones(10, device=at.device)
    dist.all_reduce(x)
    go_on = at.delay()
    work = dist.all_reduce(x, async_op=True)
    with pytest.raises(errors.Timeout, match="all_reduce: wait"):
        work.wait(timedelta(milliseconds=100))  # such a wait is for the device
    go_on()
    work.wait(timedelta(seconds=60))
    assert work.is_completed()
    assert work.is_success()


def _late_error(at: Any) -> tuple[bool, str]:
    group = dist.new_group(backend="cpu:pycomm,privateuseone:pycomm", timeout=timedelta(seconds=20))
    x = torch.ones(10, device=at.device)
    dist.all_reduce(x, group=group)
    x.cpu()
    go_on = at.delay() if dist.get_rank() else None
    opts = dist.AllreduceOptions()
    opts.timeout, opts.asyncOp = timedelta(seconds=1), True
    work = group.allreduce([x], opts)
    work.wait()
    deadline = time.monotonic() + 60
    while not work.is_completed():  # the watchdog of the device aborts the hanging call
        assert time.monotonic() < deadline
    assert not work.is_success()  # completion implies that the outcome is known
    with pytest.raises(errors.Error, match=r"all_reduce\(float32, count 10, sum") as caught:
        work.wait()
    backend = group._get_backend(at.device)
    assert "SUCCESS" not in str(backend.get_error())
    with pytest.raises(errors.GroupBroken, match="all_reduce"):
        dist.all_reduce(x, group=group)
    dist.barrier()  # the default group still works
    if go_on:
        go_on()
    return isinstance(caught.value, errors.Timeout), str(caught.value)


def test_an_error_on_the_device_reaches_the_handle_and_later_calls(run: Run) -> None:
    found = run(2, _late_error)
    assert any(first for first, _ in found), found  # the other rank may learn of it through NCCL


@in_processes(3)
def test_mismatch_changes_no_array(at: Any) -> None:
    x = torch.ones(10 + dist.get_rank(), device=at.device)
    with pytest.raises(errors.Mismatch, match="no array was changed"):
        dist.all_reduce(x)
    with pytest.raises(errors.Mismatch, match="on CUDA devices"):
        dist.all_reduce(x, async_op=True).wait()
    future = dist.all_reduce(x, async_op=True).get_future()
    with pytest.raises(errors.Mismatch):
        future.wait()
    assert (x.cpu() == 1).all()
    gives = [2, 2, 3 if dist.get_rank() == 1 else 2]  # the input and output of rank 0 match
    z = torch.zeros(6, device=at.device)
    with pytest.raises(errors.Mismatch, match=r"rank 1 \(.* sends 3 elements to rank 2 \("):
        dist.all_to_all_single(z, torch.ones(sum(gives), device=at.device), [2, 2, 2], gives)
    assert not z.cpu().any()
    y = torch.ones(10, device=at.device)
    dist.all_reduce(y)
    assert (y.cpu() == dist.get_world_size()).all()


@in_processes(2)
def test_unsupported_calls_raise_immediately(at: Any) -> None:
    x = torch.ones(10, device=at.device)
    with pytest.raises(errors.InvalidArgument, match="in one call"):
        dist.all_gather([torch.empty(10), torch.empty(10)], x)
    dist.all_reduce(x)


@in_processes(2)
def test_abort_ends_device_work(at: Any) -> None:
    x = torch.ones(10, device=at.device)
    dist.all_reduce(x)
    x.cpu()
    go_on = at.delay()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    if dist.get_rank() == 0:
        dist.group.WORLD._get_backend(at.device).abort()
    with pytest.raises(errors.Error, match=r"abort|gone|closed"):
        while True:
            dist.all_reduce(x)
    deadline = time.monotonic() + 60
    while work.is_success():
        assert time.monotonic() < deadline
    go_on()


@in_processes(3)
def test_groups_of_some_ranks_and_with_gloo_for_the_cpu(at: Any) -> None:
    both = "cpu:gloo,privateuseone:pycomm"
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 2], backend=both)
    x, y = torch.full((4,), float(rank), device=at.device), torch.ones(4)
    if rank != 1:
        pair._get_backend(at.device).eager_connect_single_device(at.device)  # as device_id= does
        dist.all_reduce(x, group=pair)
        assert (x.cpu() == 2).all()
        dist.all_reduce(y, group=pair)
        assert (y == 2).all()
        assert torch_backend.stats(pair)["frames_sent"] > 0
    z = torch.ones(4, device=at.device)
    dist.all_reduce(z)
    assert (z.cpu() == size).all()


@in_processes(2)
def test_coalesced_calls(at: Any) -> None:
    check_coalesced(at)


@in_processes(2)
def test_another_thread_asks_during_a_capture(at: Any) -> None:
    x, y = (torch.ones(100, device=at.device) for _ in range(2))
    dist.all_reduce(y)
    y.cpu()
    go_on = at.delay()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    before = at.stream(2)
    stream = at.module.stream(at.index)
    at.runtime.begin_capture(stream)  # in the global mode, which torch uses
    backend = dist.group.WORLD._get_backend(at.device)
    with ThreadPoolExecutor() as other:
        assert not other.submit(work.is_completed).result()
        other.submit(backend.get_error).result()
    dist.all_reduce(y)
    at.runtime.end_capture(stream)  # raises if a query ended the capture
    at.stream(before)
    go_on()
    x.cpu()
    assert work.is_completed()


@in_processes(2)
def test_barrier_waits_for_the_device(at: Any) -> None:
    x = torch.ones(10, device=at.device)
    dist.all_reduce(x)
    x.cpu()
    go_on = at.delay()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    with pytest.raises(errors.Timeout, match="barrier: earlier work on"):
        opts = dist.BarrierOptions()
        opts.timeout, opts.asyncOp = timedelta(milliseconds=100), False
        dist.group.WORLD.barrier(opts)
    dist.barrier(async_op=True).wait()  # of the CPU threads
    assert not work.is_completed()
    go_on()
    dist.barrier()
    assert work.is_completed()


@in_processes(2)
def test_ddp_trains_as_on_the_cpu(at: Any) -> None:
    for there, here in zip(train(at.device), train("cpu"), strict=True):
        torch.testing.assert_close(there, here)
    assert at.counts()["collectives"] > 0


@in_processes(2)
def test_options_set_the_device_transport(at: Any) -> None:
    met, plain = [], device_groups._make

    def noted(*given: Any) -> Any:
        met.append(given[3:])
        return plain(*given)

    device_groups._make = noted
    try:
        requested = torch_backend.Options(
            cuda_channels=2,
            cuda_internode_transport="tcp",
            cuda_agreement="after",
        )
        both = "cpu:pycomm,privateuseone:pycomm"
        group = dist.new_group(backend=both, pg_options=requested)
        x = torch.ones(10, device=at.device)
        dist.all_reduce(x, group=group)
        options = copy.deepcopy(group._get_backend(at.device).options)
        assert (options.cuda_channels, options.cuda_internode_transport) == (2, "tcp")
        assert options.cuda_agreement == "after"
        part = group.split_group(list(range(group.size())), opts=options, group_name="part")
        part.allreduce([x]).wait()
        assert (x.cpu() == group.size() ** 2).all()
    finally:
        device_groups._make = plain
    assert met == [(device_groups.Options(2, "tcp", "after"),)] * 2
    with pytest.raises(errors.InvalidArgument, match=r"got 'udp', expected one of nccl, tcp"):
        torch_backend.Options(cuda_internode_transport="udp")
    with pytest.raises(errors.InvalidArgument, match="cuda_channels: got 0"):
        torch_backend.Options(cuda_channels=0)
    with pytest.raises(errors.InvalidArgument, match="cuda_agreement: got 'late'"):
        torch_backend.Options(cuda_agreement="late")
    with pytest.raises(errors.Unsupported, match="symmetric memory was removed: omit it"):
        torch_backend.Options(cuda_symmetric_memory=True)
