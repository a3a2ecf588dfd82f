"""Abort hooks of the backend "pycomm", and from torch 2.14 on `reconfigure` of process groups.

tests/compat/fault_tolerance.py runs PyTorch's own tests of it.
"""

import multiprocessing
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# pytest finds the fixtures by name, so that they look unused.
from torch_ranks import LIMIT_S, Run, in_processes, run_fixture  # noqa: F401 - a fixture

import pycomm
from pycomm import torch_backend
from pycomm.errors import Error, GroupBroken, InvalidArgument, Timeout

CPU = torch.device("cpu")
WAIT = timedelta(seconds=60)
ErrorType: Any = torch._C._distributed_c10d.ErrorType


def _expect_sum(mine: int, all_values: list[int]) -> None:
    x = torch.full((1000,), float(mine))
    dist.all_reduce(x)
    assert (x == sum(all_values)).all()


def _backend() -> Any:
    group = dist.group.WORLD
    assert group is not None
    return group._get_backend(CPU)


@in_processes(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_abort_hooks_run_when_a_call_breaks_the_group(asynchronous: bool) -> None:
    """Hooks run once, before the error is reported; one that fails does not stop the others."""
    dist.barrier()
    backend = _backend()
    called: list[tuple[int, object]] = []
    over = threading.Event()

    def fail() -> None:
        raise ValueError("a warning contains this text")

    backend.register_abort_hook(0, fail)
    backend.register_abort_hook(1, lambda: called.append((1, backend.get_error())))
    backend.register_abort_hook(2, lambda: called.append((2, None)))
    backend.register_abort_hook(3, over.set)
    backend.unregister_abort_hook(2)
    backend.unregister_abort_hook(17)
    with pytest.raises(InvalidArgument):  # a usage error
        dist.all_reduce(torch.ones(4).expand(2, 4), group=None)
    assert called == []
    assert backend.get_error() == ErrorType.SUCCESS
    if dist.get_rank() == 0:
        backend.set_timeout(timedelta(seconds=1))
        if asynchronous:
            work = dist.all_reduce(torch.ones(4), async_op=True)
            assert over.wait(LIMIT_S)
            with pytest.raises(Timeout):
                work.wait()
        else:
            with pytest.raises(Timeout):
                dist.all_reduce(torch.ones(4))
        error = ErrorType.TIMEOUT
    else:
        assert dist.distributed_c10d._get_default_store().get("0 timed out") == b"1"
        with pytest.raises(Error):
            while True:  # the data of rank 0's call may have arrived
                dist.all_reduce(torch.ones(4))
        error = backend.get_error()
        assert error != ErrorType.SUCCESS
    dist.distributed_c10d._get_default_store().set("0 timed out", "1")
    with pytest.raises(GroupBroken):
        dist.all_reduce(torch.ones(4))
    assert called == [(1, error)]


def _init(rank: int, size: int, path: Path) -> dist.FileStore:
    store = dist.FileStore(str(path))
    dist.init_process_group(
        "pycomm", store=store, rank=rank, world_size=size, timeout=WAIT, enable_reconfigure=True
    )
    return store


def _handles(store: dist.Store, name: str, rank: int, ranks: list[int]) -> list[str]:
    store.set(f"{name}/{rank}", dist._get_reconfigure_handle())
    return [store.get(f"{name}/{one}").decode() for one in ranks]


def _change(path: Path) -> None:
    """The first group, other orders and sizes, invalid arguments and a group that does not form."""
    rank = dist.get_rank()
    assert not dist._supports_reconfigure()  # of the pool's group
    dist.destroy_process_group()
    store = _init(rank, 3, path)
    assert dist._supports_reconfigure()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 3)
    for call in (lambda: dist.all_reduce(torch.ones(1)), lambda: pycomm.all_reduce(torch.ones(1))):
        with pytest.raises(GroupBroken, match=r"call reconfigure\(\) on it first"):
            call()
    assert _backend().get_error() != ErrorType.SUCCESS
    handles = _handles(store, "first", rank, [0, 1, 2])

    order = [2, 0, 1]
    dist._reconfigure(1, [handles[one] for one in order]).wait()
    assert (dist.get_rank(), dist.get_world_size()) == (order.index(rank), 3)
    assert _backend().get_error() == ErrorType.SUCCESS
    _expect_sum(rank, [0, 1, 2])
    group = pycomm.default_group.default()
    assert (group.rank, group.size) == (order.index(rank), 3)
    assert group.core.name.startswith("reconfigure-1")
    assert dist.group.WORLD._get_sequence_number_for_group() == 1
    dist._reconfigure(2, set(handles), timeout=WAIT).wait()
    assert dist.get_rank() == sorted(handles).index(handles[rank])
    _expect_sum(rank, [0, 1, 2])
    assert dist.group.WORLD._get_sequence_number_for_group() == 1

    with pytest.raises(InvalidArgument, match="uuid 2 was already used"):
        dist._reconfigure(2, handles)
    with pytest.raises(InvalidArgument, match="do not contain that of this rank"):
        dist._reconfigure(3, [one for one in handles if one != handles[rank]])
    _expect_sum(rank, [0, 1, 2])  # these had no effect

    if rank == 2:
        assert store.get("failed/0") + store.get("failed/1") == b"11"
        with pytest.raises(Error):  # the others left the group
            _expect_sum(rank, [0, 1, 2])
    else:
        with pytest.raises(Timeout, match=r"these did not join: 2; call reconfigure\(\) again"):
            dist._reconfigure(4, handles, timeout=timedelta(seconds=1))
        assert dist.get_world_size() == 3
        with pytest.raises(GroupBroken):
            _expect_sum(rank, [0, 1, 2])
        store.set(f"failed/{rank}", "1")
    if rank < 2:
        dist._reconfigure(5, handles[:2]).wait()
        assert dist.get_world_size() == 2
        _expect_sum(rank, [0, 1])
    dist._reconfigure(6, handles).wait()
    assert _backend().get_error() == ErrorType.SUCCESS
    _expect_sum(rank, [0, 1, 2])
    part = dist.group.WORLD.split_group([0, 1], timeout=WAIT)
    if rank < 2:
        assert not part.supports_reconfigure
        x = torch.ones(5)
        dist.all_reduce(x, group=part)
        assert (x == 2).all()
    dist.barrier()


def _release() -> None:
    """Ranks that wait in a call of the old group get an error when another rank leaves it."""
    rank = dist.get_rank()
    options = torch_backend.Options()
    options.enable_reconfigure = True
    group = dist.new_group(pg_options=options)
    backend = group._get_backend(CPU)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"handle/{rank}", group.get_reconfigure_handle())
    handles = [store.get(f"handle/{one}").decode() for one in range(3)]

    def reconfigure(uuid: int) -> None:
        given = dist.distributed_c10d.ReconfigureOptions()
        given.uuid, given.handles = uuid, handles
        group.reconfigure(given).wait()

    def expect_sum() -> None:
        x = torch.full((1000,), float(rank))
        dist.all_reduce(x, group=group)
        assert (x == 3).all()

    reconfigure(1)
    expect_sum()
    called = threading.Event()
    backend.register_abort_hook(0, called.set)
    if rank > 0:
        with pytest.raises(Error):
            dist.all_reduce(torch.ones(1), group=group)
        assert called.is_set()
    reconfigure(2)
    expect_sum()
    _expect_sum(rank, [0, 1, 2])  # the default group is not affected
    assert pycomm.default_group.default().core.name != "reconfigure-2"


def _lose_and_replace(process: int, path: Path, answers: Any) -> None:
    """Process 1 of 3 dies in a group; process 3 takes its place, as the last rank."""
    torch.set_num_threads(1)
    store = _init(process, 4, path)
    if process < 3:
        dist._reconfigure(1, _handles(store, "first", process, [0, 1, 2])).wait()
        _expect_sum(process, [0, 1, 2])
        if process == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(Error, match="rank 1"):
            while True:
                _expect_sum(process, [0, 1, 2])
        assert _backend().get_error() != ErrorType.SUCCESS
    dist._reconfigure(2, _handles(store, "second", process, [0, 2, 3])).wait()
    assert _backend().get_error() == ErrorType.SUCCESS
    _expect_sum(process, [0, 2, 3])
    answers.put((process, dist.get_rank(), dist.get_world_size()))
    dist.barrier()
    dist.destroy_process_group()


# What follows needs torch 2.14: tools/matrix.py runs it with each supported torch.
if hasattr(dist, "_reconfigure"):

    def test_a_process_group_takes_the_ranks_of_each_reconfigure(run: Run, tmp_path: Path) -> None:
        run(3, _change, tmp_path / "reconfigure")

    def test_reconfigure_ends_calls_under_way(run: Run) -> None:
        run(3, _release)

    def test_a_new_process_replaces_a_dead_one(tmp_path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        answers = context.SimpleQueue()
        arguments = (tmp_path / "store", answers)
        processes = [
            context.Process(target=_lose_and_replace, args=(number, *arguments), daemon=True)
            for number in range(4)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_S)
        assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0, 0]
        assert sorted(answers.get() for _ in range(3)) == [(0, 0, 3), (2, 1, 3), (3, 2, 3)]
