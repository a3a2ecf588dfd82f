"""A process starts and stops a group again and again on one port, with a rank that is killed in
every second one: no cycle fails, and no resource leaks.
"""

import contextlib
import multiprocessing as mp
import os
import signal
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

import pycomm
from benchmarks.support.leak_check import leaked, resources
from benchmarks.support.ports import free_port
from pycomm import errors

CYCLES = 100
WARM = 10  # before resources are counted


def join_and_call(rank: int, master: str, dies: bool) -> None:
    """Forms, calls and leaves. If `dies`, rank 1 kills itself, which rank 0 survives."""
    pycomm.init(rank=rank, size=2, master=master, transport="tcp", secret="0123456789abcdef")
    x = np.ones(1000, np.float32)
    pycomm.all_reduce(x)
    if dies and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(errors.PeerLost) if dies else contextlib.nullcontext():
        while dies or x[0] < 4:
            pycomm.all_reduce(x)
    pycomm.shutdown()


def cycles(master: str) -> list[int]:
    """The exit codes of rank 1, which is a child process in each cycle."""
    codes = []
    for number in range(CYCLES):
        if number == WARM:
            before = resources()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(errors.Error):  # rank 0 reports its own
                join_and_call(1, master, number % 2 == 1)
                os._exit(0)
            os._exit(1)
        join_and_call(0, master, number % 2 == 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert leaked(before) == ""
    return codes


def test_groups_start_and_stop_on_one_port() -> None:
    """In a process without other threads, since it forks."""
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
        codes = pool.submit(cycles, f"127.0.0.1:{free_port()}").result()
    assert codes == [0, -signal.SIGKILL] * (CYCLES // 2)
