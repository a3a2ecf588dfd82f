"""The processes of the demo and the benchmarks: their messages arrive, and all of them end."""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from pycomm._process_pool import RankFailed
from pycomm.bench.support import processes


def report_twice(rank: processes.Rank, word: str) -> None:
    """Reports two messages."""
    rank.send((word, rank.size))
    rank.send(os.getpid())


def fail(rank: processes.Rank, reports: bool) -> None:
    """Rank 1 fails while the others wait for it, or report, without a limit."""
    if rank.rank == 1:
        raise ValueError("no more paper")
    while reports:
        rank.send(0)
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.size)


def linger(rank: processes.Rank) -> None:
    """Waits in C++ for a missing rank, on a store that the parent does not serve."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank.send(os.getpid())
    store.wait(["never"])


def test_every_report_of_a_rank_is_received() -> None:
    received: dict[int, list[Any]] = {0: [], 1: []}
    processes.run(report_twice, ("hello",), 2, lambda rank, message: received[rank].append(message))
    assert [message[0] for message in received.values()] == [("hello", 2)] * 2
    assert len({message[1] for message in received.values()}) == 2


@pytest.mark.parametrize("reports", [False, True])
def test_rank_error_is_shown_and_ends_the_run(reports: bool) -> None:
    others = set(multiprocessing.active_children())
    with pytest.raises(RankFailed, match="no more paper"):
        processes.run(fail, (reports,), 2, lambda rank, message: None)
    assert set(multiprocessing.active_children()) <= others


def test_listener_error_ends_the_run() -> None:
    others = set(multiprocessing.active_children())

    def fail_to_receive(rank: int, message: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.run(linger, (), 2, fail_to_receive)
    assert set(multiprocessing.active_children()) <= others


def test_killed_parent_leaves_no_orphans() -> None:
    code = (
        "from pycomm.bench.support import processes; from test_processes import linger\n"
        "if __name__ == '__main__':\n"
        "    processes.run(linger, (), 2, lambda rank, message: print(message, flush=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
        assert parent.stdout is not None
        ranks = [os.pidfd_open(int(parent.stdout.readline())) for _ in range(2)]
        parent.send_signal(signal.SIGKILL)
    try:
        for rank in ranks:
            assert select.select([rank], [], [], 5)[0] == [rank]
    finally:
        for rank in ranks:
            os.close(rank)
