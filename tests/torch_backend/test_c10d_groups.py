"""Groups of the backend "pycomm": creation, split, mesh, abort, waits, and ranks as threads.

The functions `_...` run in the processes of torch_ranks.py; test_c10d.py has the verbs.
"""

import copy
import os
import resource
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

# pytest finds the fixtures by name, so that they look unused.
from torch_ranks import CALL_S, SIZES, Run, in_processes, run_fixture, same  # noqa: F401 - a fixture

import pycomm
from pycomm import torch_backend
from pycomm.errors import Error, GroupBroken, Timeout, Unsupported

CPU = torch.device("cpu")


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _sum_of_ranks(group: dist.ProcessGroup, members: list[int]) -> None:
    x = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(x, group=group)
    assert (x == sum(members)).all()


@in_processes(3)
def test_rank_without_descriptors_is_named_by_all() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    dist.new_group()  # opens the connections to the store that a new group needs
    if dist.get_rank() == 1:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, before[1]))
    try:
        with pytest.raises(Unsupported, match=r"rank 1 \(host .* raise the limit there") as caught:
            dist.new_group()
        assert caught.value.peer == 1
        _sum_of_ranks(dist.group.WORLD, [0, 1, 2])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    _sum_of_ranks(dist.new_group(), [0, 1, 2])


@in_processes(4)
def test_two_hundred_groups_need_four_descriptors_each() -> None:
    """Within the usual limit of 1,024: a socket for each peer, and one to wait for them. And a
    thread, which sends heartbeats."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    opened, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    groups = [dist.new_group() for _ in range(200)]
    try:
        for group in groups:
            _sum_of_ranks(group, [0, 1, 2, 3])
        assert len(os.listdir("/proc/self/fd")) - opened <= 4 * 200 + 8
        assert len(os.listdir("/proc/self/task")) - threads <= 200 + 2
    finally:
        for group in groups:
            dist.destroy_process_group(group)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    dist.barrier()


@in_processes(3)
def test_a_later_group_of_one_host_needs_no_store() -> None:
    """Not even for a secret or a count: its key and name derive from the default group's. A rank
    that comes more than 100 ms late finds the others' infos in the store, too."""
    stored = []
    for _ in range(10):
        dist.barrier()
        before = _store().num_keys()
        dist.barrier()
        part = dist.new_group()
        dist.barrier()
        stored.append(_store().num_keys() - before)
        _sum_of_ranks(part, [0, 1, 2])
    assert min(stored) == 0
    assert max(stored) <= 3


@in_processes(2)
def test_a_group_without_global_ranks_has_its_own_engine() -> None:
    """As programs make one of ranks of several runs, which may have other places in their own."""
    c10d: Any = dist.distributed_c10d
    rank, limit = dist.get_rank(), timedelta(seconds=CALL_S)
    store = dist.PrefixStore("other", _store())
    group, _ = c10d._new_process_group_helper(
        2, rank, [], dist.Backend("pycomm"), store, group_name="other", timeout=limit
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    before = torch_backend.stats()["calls"]
    _sum_of_ranks(group, [0, 1])
    assert torch_backend.stats()["calls"] == before
    pycomm.all_reduce(torch.ones(3))
    assert torch_backend.stats()["calls"] == before + 1  # pycomm's default group is torch's
    dist.destroy_process_group(group)
    _sum_of_ranks(dist.group.WORLD, [0, 1])


@in_processes(2)
def test_a_group_can_be_made_again_under_its_name() -> None:
    """torch derives the name from the ranks; the keys of the earlier groups are still there."""
    for _ in range(3):
        part = dist.new_group([0, 1], use_local_synchronization=True)
        _sum_of_ranks(part, [0, 1])
        dist.destroy_process_group(part)


@in_processes(3)
def test_new_groups_of_some_ranks_and_with_other_limits() -> None:
    rank = dist.get_rank()
    for members in ([1, 2], [0, 2], [2]):
        group = dist.new_group(members)
        if rank in members:
            assert dist.get_process_group_ranks(group) == members
            calls = torch_backend.stats(group)["calls"]
            _sum_of_ranks(group, members)
            assert torch_backend.stats(group)["calls"] == calls + 1
            y = torch.tensor([float(rank)])
            dist.broadcast(y, src=members[-1], group=group)
            assert y.item() == members[-1]
            dist.destroy_process_group(group)
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
    mine = [0, 1] if rank < 2 else [2]  # only the members call it
    local = dist.new_group(mine, use_local_synchronization=True)
    _sum_of_ranks(local, mine)
    short = dist.new_group(timeout=timedelta(milliseconds=300))
    options = short._get_backend(CPU).options
    assert options._timeout == timedelta(milliseconds=300)
    assert dist.group.WORLD._get_backend(CPU).options._timeout == timedelta(seconds=CALL_S)
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(Timeout):
            dist.all_reduce(torch.ones(1), group=short)
        assert 0.2 < time.monotonic() - start < 5
        assert short._get_backend(CPU).get_error() == torch._C._distributed_c10d.ErrorType.TIMEOUT
        _store().set("timed out", "yes")
    _store().wait(["timed out"])
    _sum_of_ranks(dist.group.WORLD, [0, 1, 2])  # the other groups work


@in_processes(2)
def test_a_call_has_its_own_limit() -> None:
    group = dist.new_group()
    if dist.get_rank() == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(milliseconds=200)
        start = time.monotonic()
        with pytest.raises(Timeout):
            group._get_backend(CPU).allreduce([torch.ones(1)], options).wait()
        assert 0.15 < time.monotonic() - start < 5
        _store().set("over", "yes")
    _store().wait(["over"])


@in_processes(2, 3)
def test_split_group() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    backend = world._get_backend(CPU)
    assert backend.supports_splitting
    options = copy.deepcopy(backend.options)
    given = options.group_name
    half = [r for r in range(size) if r % 2 == rank % 2]
    part = world.split_group(half, opts=options, group_name=f"half {rank % 2}")
    if hasattr(dist, "gather_single"):  # torch 2.14: earlier versions write into the given options
        assert options.group_name == given
    assert (part.rank(), part.size()) == (half.index(rank), len(half))
    x = torch.full((3,), float(rank))
    part.allreduce([x]).wait()
    assert (x == sum(half)).all()
    alone = world.split_group([size - 1], opts=options, group_name="alone")
    assert (alone is None) == (rank != size - 1)
    part._get_backend(CPU).shutdown()
    _sum_of_ranks(world, list(range(size)))
    backend.perform_nocolor_split(CPU)  # new_group requires this of ranks outside the group


@in_processes(2, 3)
def test_abort_ends_the_calls_that_wait() -> None:
    group = dist.new_group()
    backend = group._get_backend(CPU)
    if dist.get_rank() == 1:
        _store().wait(["waits"])
        dist.distributed_c10d._abort_process_group(group)
    else:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        _store().set("waits", "yes")
        start = time.monotonic()
        with pytest.raises(Error, match="abort"):
            work.wait()
        assert time.monotonic() - start < 10, "long before the limit"
        with pytest.raises(Error, match="abort"):
            work.get_future().wait()
    with pytest.raises(GroupBroken):
        backend.allreduce([torch.ones(1)]).wait()
    _sum_of_ranks(dist.group.WORLD, list(range(dist.get_world_size())))


@in_processes(2)
def test_abort_on_the_rank_that_waits() -> None:
    group = dist.new_group()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        group.abort()
        with pytest.raises(Error, match="abort"):
            work.wait()
    _store().set(f"done {dist.get_rank()}", "yes")
    _store().wait([f"done {r}" for r in range(2)])


@in_processes(2, 3)
def test_monitored_barrier() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    for wait_all in (False, True):
        group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=wait_all)
    dist.all_reduce(torch.ones(3), group=group)
    with pytest.raises(Timeout, match=f"Rank {rank} timed out in monitoredBarrier"):
        group.monitored_barrier(timedelta(0))
    limit = timedelta(milliseconds=300)
    if rank == 0:
        late = "Ranks " + ", ".join(map(str, range(1, size)))
        with pytest.raises(Timeout, match=f"{late} failed to pass monitoredBarrier") as caught:
            group.monitored_barrier(limit, wait_all_ranks=True)
        assert caught.value.peer == 1
    _store().set(f"through {rank}", "yes")
    _store().wait([f"through {r}" for r in range(size)])


@in_processes(3)
def test_monitored_barrier_names_the_missing_rank() -> None:
    rank = dist.get_rank()
    group = dist.new_group()
    limit = timedelta(seconds=1)
    if rank == 0:
        with pytest.raises(Timeout, match="Rank 1 failed to pass monitoredBarrier in 1000 ms"):
            group.monitored_barrier(limit)
    elif rank == 2:
        with pytest.raises(Error, match="Rank 2 successfully reached monitoredBarrier"):
            group.monitored_barrier(timedelta(seconds=15))
    _store().set(f"through {rank}", "yes")
    _store().wait([f"through {r}" for r in range(3)])


@in_processes(2)
def test_debug_level_detail() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
        _sum_of_ranks(group, list(range(dist.get_world_size())))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, dist.get_rank(), group=group)
        assert gathered == list(range(dist.get_world_size()))
        group.monitored_barrier()
        assert torch_backend.stats(group)["calls"] > 0
        with pytest.raises(RuntimeError, match="mismatch"):
            dist.all_reduce(torch.ones(3 + dist.get_rank()), group=group)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@in_processes(2)
def test_tensor_allocation() -> None:
    backend = dist.group.WORLD._get_backend(CPU)
    assert backend.supports_tensor_alloc(CPU)
    x = backend.allocate_tensor(12, dtype=torch.bfloat16, device=CPU)
    assert (x.shape, x.dtype, x.device) == ((12,), torch.bfloat16, CPU)
    x.fill_(dist.get_rank() + 1)
    dist.all_reduce(x)
    assert (x == 3).all()


@in_processes(2)
def test_buckets_of_torch_ddp() -> None:
    """Torch can allocate them by the backend; summed in place, half of the bytes are sent."""
    with mock.patch.dict(os.environ, DDP_DISABLE_COMM_MEM="0"):
        _sums_half_of_its_bytes()


def _sums_half_of_its_bytes() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
    gradients = sum(p.nbytes for p in model.parameters())
    for step in range(3):  # after the first step torch rebuilds its buckets
        before = torch_backend.stats()["bytes_sent"]
        model.zero_grad()
        model(torch.ones(2, 300) * (dist.get_rank() + 1)).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.full((300, 300), 3.0))
        if step > 0:
            sent = torch_backend.stats()["bytes_sent"] - before
            assert gradients // 2 - 4 * 128 <= sent < gradients  # cut at 128 elements


class Threads:
    """Ranks as threads of this process, each with its own state of torch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = dist.HashStore()
        self.failures: list[BaseException] = []

    def run(self, fn: Callable[[int, int], None]) -> None:
        from torch.testing._internal.distributed import multi_threaded_pg

        if not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):  # torch 2.11 reads it anyway
            multi_threaded_pg.ThreadLocalWorld.comms = []
        multi_threaded_pg._install_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        try:
            threads = [threading.Thread(target=self._one, args=(r, fn)) for r in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
            multi_threaded_pg._uninstall_threaded_pg()
        if self.failures:
            raise self.failures[0]

    def _one(self, rank: int, fn: Callable[[int, int], None]) -> None:
        try:
            dist.init_process_group(
                "pycomm",
                rank=rank,
                world_size=self.size,
                store=self.store,
                timeout=timedelta(seconds=20),
            )
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    fn(rank, self.size)
            finally:
                dist.destroy_process_group()
        except BaseException as error:  # any error is returned to the test
            self.failures.append(error)


def _as_a_thread(rank: int, size: int) -> None:
    import torch.distributed._functional_collectives as functional

    _sum_of_ranks(dist.group.WORLD, list(range(size)))
    group = pycomm.init()
    assert (group.rank, group.size, pycomm.rank()) == (rank, size, rank)
    pairs = [dist.new_group([r, (r + 1) % size]) for r in range(size)]
    for r, pair in enumerate(pairs):
        if rank in (r, (r + 1) % size):
            _sum_of_ranks(pair, [r, (r + 1) % size])
    x = functional.all_reduce(torch.full((4,), float(rank)), "sum", dist.group.WORLD)
    assert (x == sum(range(size))).all()
    model = torch.nn.Linear(2, 2)
    for p in model.parameters():
        torch.nn.init.constant_(p, 1.0)
    model = torch.nn.parallel.DistributedDataParallel(model)
    model(torch.full((1, 2), float(rank))).sum().backward()
    mean = sum(range(size)) / size
    assert torch.allclose(model.module.weight.grad, torch.full((2, 2), mean))
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, threading.get_ident())
    assert len(set(everyone)) == size


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_as_threads(size: int) -> None:
    assert not pycomm.is_initialized()
    Threads(size).run(_as_a_thread)
    assert not pycomm.is_initialized()
    # torch stores the module whose forward() runs in its class; threads overwrite each other's.
    torch.nn.parallel.DistributedDataParallel._active_ddp_module = None
