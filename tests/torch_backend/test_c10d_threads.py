"""Several threads on one group of the backend "pycomm", with Options(thread_multiple=True).

The functions `_...` run in the processes of torch_ranks.py; tests/ranks/test_thread_multiple.py has
the errors of the core.
"""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_ranks import CALL_S, Run, in_processes, run_fixture  # noqa: F401 - a fixture

from pycomm import torch_backend
from pycomm.errors import GroupBroken

SMALL, LARGE = 10, 300_000


def _group() -> dist.ProcessGroup:
    made = dist.new_group(pg_options=torch_backend.Options(thread_multiple=True))
    assert isinstance(made, dist.ProcessGroup)
    return made


def _together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of the calls, each on a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [made.result() for made in [pool.submit(call) for call in calls]]


def _sum(group: dist.ProcessGroup, n: int, *, asynchronous: bool) -> float:
    x = torch.ones(n)
    work = dist.all_reduce(x, group=group, async_op=asynchronous)
    if work is not None:
        work.wait()
    return float(x.mean())


@in_processes(2, 4)
def test_messages_pass_a_collective() -> None:
    group, rank, size = _group(), dist.get_rank(), dist.get_world_size()

    def sends(x: torch.Tensor) -> None:
        dist.send(x, 1, group)

    def starts(x: torch.Tensor) -> None:
        work = dist.isend(x, 1, group, 5)
        assert work is not None
        work.wait()

    for n in (SMALL, LARGE):
        for asynchronous in (False, True):
            total = functools.partial(_sum, group, n, asynchronous=asynchronous)
            x = torch.full((n,), 7.0)
            if rank == 0:
                _together(total, functools.partial(sends, x), functools.partial(starts, x))
                continue
            if rank == 1:
                for tag in (0, 5):
                    received = torch.empty(n)
                    dist.recv(received, 0, group, tag)
                    assert torch.equal(received, x)
            assert total() == size
    dist.destroy_process_group(group)


@in_processes(2, 4)
def test_batches_of_two_threads() -> None:
    """torch keeps one batch for all threads of a group, so the backend must not offer batches."""
    group, rank = _group(), dist.get_rank()

    def swap(tag: int) -> None:
        for i in range(20 if rank < 2 else 0):
            mine, theirs = torch.full((SMALL,), tag * 100.0 + i), torch.empty(SMALL)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, mine, 1 - rank, group, tag),
                    dist.P2POp(dist.irecv, theirs, 1 - rank, group, tag),
                ]
            )
            for work in works:
                work.wait()
            assert torch.equal(mine, theirs)

    _together(lambda: swap(1), lambda: swap(2))
    dist.destroy_process_group(group)


@in_processes(2)
def test_destroying_a_group_while_threads_wait() -> None:
    group = _group()
    if dist.get_rank() == 1:
        dist.barrier()
        dist.destroy_process_group(group)
        return
    first = dist.all_reduce(torch.ones(SMALL), group=group, async_op=True)
    begun = threading.Semaphore(0)

    def waits(call: Callable[[], Any]) -> None:
        begun.release()
        with pytest.raises(GroupBroken):
            call()

    def end() -> None:
        for _ in range(3):
            begun.acquire()
        dist.destroy_process_group(group)

    _together(
        lambda: waits(first.wait),
        lambda: waits(lambda: dist.barrier(group)),
        lambda: waits(lambda: dist.recv(torch.empty(1), 1, group)),
        end,
    )
    dist.barrier()


@in_processes(2)
def test_a_second_thread_is_rejected_without_the_option() -> None:
    group, rank = dist.new_group(), dist.get_rank()
    if rank == 1:
        dist.barrier()
        dist.all_reduce(torch.ones(1), group=group)
        return
    refused = threading.Event()

    def call() -> str:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except ValueError as error:  # the result
            refused.set()
            return str(error)
        return ""

    def release() -> None:
        assert refused.wait(CALL_S)
        dist.barrier()

    first, second = sorted(_together(call, call, release)[:2])
    assert first == ""
    assert "thread_multiple=True" in second


@in_processes(2)
def test_a_subgroup_has_the_option_of_its_parent() -> None:
    group = _group()
    part = group.split_group([0, 1])
    assert part is not None
    _together(*[lambda: _sum(part, SMALL, asynchronous=False) for _ in range(3)])
