"""Ranks that are stopped or busy: the error names the right rank, and no rank hangs. Also tests the
tools for fault injection and for simulated links.

Other faults: test_fault_matrix.py.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import Group, errors
from pycomm.testing import FaultPlan, run_ranks, status

HEARTBEAT_S = 1.0
TRANSPORTS = ["shm", "tcp"]


def hold_the_gil(seconds: float) -> None:
    """Blocks all other Python threads, like a long call of a C library."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL keeps the GIL


def signal_later(seconds: float, pid: int, sign: signal.Signals) -> int:
    """Forks a child that sends `sign` to `pid` after `seconds`; returns the child's pid."""
    child = os.fork()
    if child == 0:
        time.sleep(seconds)  # a deliberate delay
        os.kill(pid, sign)
        os._exit(0)
    return child


def busy_outside(group: Group) -> Any:
    """Rank 1 enters a call late, as its Python is busy."""
    for _ in range(2):
        if group.rank == 1:
            hold_the_gil(3 * HEARTBEAT_S)
        pycomm.barrier(group=group)
    return pycomm.all_reduce(np.ones(4), group=group).tolist()


def busy_inside(group: Group) -> Any:
    """Rank 1 waits for rank 0 in a call while another of its threads holds the GIL, and rank 2
    waits for rank 1."""
    busy = threading.Timer(0.5, hold_the_gil, [3 * HEARTBEAT_S])
    if group.rank == 1:
        busy.start()
    if group.rank == 0:
        time.sleep(0.5 + 3 * HEARTBEAT_S)  # until the other rank is no longer busy
    x = pycomm.all_reduce(np.ones(4), algorithm="ring", group=group).tolist()
    if group.rank == 1:
        busy.join()
    return x


@pytest.mark.parametrize("fn", [busy_outside, busy_inside])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_busy_rank_is_not_reported_dead(transport: str, fn: Callable[..., Any]) -> None:
    results = run_ranks(3, fn, transport=transport, processes=True, heartbeat_s=HEARTBEAT_S)
    assert results == [[3.0] * 4] * 3


def receive_slowly(group: Group, x: Any) -> float:
    """Rank 1 receives from rank 2 in a call that takes long, since rank 0's data reaches it byte by
    byte; returns the duration."""
    start = time.monotonic()
    if group.rank < 2:
        pycomm.recv(x, group.rank + 1, group=group)
    if group.rank > 0:
        pycomm.send(x, group.rank - 1, group=group)
    return time.monotonic() - start


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_slow_peer_is_not_reported_dead(transport: str) -> None:
    drops = FaultPlan(1, "throttle", peer=2)
    seconds: list[float] = [0.0]
    count = 1 << 12
    while min(seconds) < 2 * HEARTBEAT_S:  # the duration of so many bytes depends on the machine
        count *= 2
        x = [np.full(count, rank, np.float32) for rank in range(3)]
        seconds = run_ranks(
            3, lambda group, x: receive_slowly(group, x[group.rank]), x,
            transport=transport, heartbeat_s=HEARTBEAT_S, faults=[drops],
        )[:2]  # fmt: skip
        assert all((held == 2).all() for held in x)


def stop_for_a_while(group: Group, seconds: float) -> Any:
    """Rank 1 stops for a while, and a child resumes it."""
    pycomm.barrier(group=group)
    if group.rank == 1:
        child = signal_later(seconds, os.getpid(), signal.SIGCONT)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(child, 0)
    return pycomm.all_reduce(np.ones(4), group=group).tolist()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_stops_for_less_than_the_limit_continues(transport: str) -> None:
    results = run_ranks(
        2, stop_for_a_while, 0.4 * HEARTBEAT_S,
        transport=transport, processes=True, heartbeat_s=HEARTBEAT_S,
    )  # fmt: skip
    assert results == [[2.0] * 4] * 2


def stop_while_waiting(group: Group) -> Any:
    """Rank 0 waits for rank 1; both are stopped for twice the limit, and rank 1 resumes last."""
    pycomm.barrier(group=group)
    stopper = signal_later(0.3, os.getpid(), signal.SIGSTOP)
    waker = signal_later(0.3 + 0.3 * group.rank + 2 * HEARTBEAT_S, os.getpid(), signal.SIGCONT)
    if group.rank == 1:
        os.waitpid(waker, 0)
    x = pycomm.all_reduce(np.ones(4), group=group).tolist()
    os.waitpid(stopper, 0)
    if group.rank == 0:
        os.waitpid(waker, 0)
    return x


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stopped_rank_reports_no_peer(transport: str) -> None:
    results = run_ranks(
        2, stop_while_waiting, transport=transport, processes=True, heartbeat_s=HEARTBEAT_S
    )
    assert results == [[2.0] * 4] * 2


def test_a_delay_delays() -> None:
    def fn(group: Group) -> float:
        pycomm.barrier(group=group)
        start = time.monotonic()
        # The other rank is one call ahead: its data for the last call is already in transit.
        for _ in range(3):
            pycomm.barrier(group=group)
        return time.monotonic() - start

    late = FaultPlan(rank=0, action="delay", seconds=0.1)
    assert run_ranks(2, fn, transport="tcp", faults=[late])[0] >= 0.05


@pytest.mark.parametrize("action", ["disconnect", "corrupt"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_fault_writes_its_timestamp(action: str, transport: str, tmp_path: Path) -> None:
    file = str(tmp_path / "struck")

    def fn(group: Group) -> tuple[float, float]:
        begun = []
        try:
            while True:
                begun.append(time.monotonic())
                pycomm.all_reduce(np.ones(100), group=group)
        except errors.PeerLost:  # the fault took effect
            return begun[-2], time.monotonic()  # it may take effect when the previous call is over

    fault = FaultPlan(1, action, at="all_reduce", after_bytes=20_000, timestamp_file=file)
    (_, reported), (before, _) = run_ranks(2, fn, transport=transport, faults=[fault])
    assert before <= float(Path(file).read_text()) <= reported


def test_fault_affects_only_its_group():
    def program(group: Group) -> str:
        x, part = np.ones(10_000, np.float32), group.split(0)
        assert part is not None
        for _ in range(10):
            pycomm.all_reduce(x, group=part)
        with pytest.raises(errors.PeerLost) as caught:
            pycomm.all_reduce(x, group=group)
        return str(caught.value)

    fault = FaultPlan(1, "disconnect", at="all_reduce", after_bytes=1000)
    for message in run_ranks(2, program, transport="tcp", faults=[fault]):
        assert message.startswith("all_reduce: rank")


def test_fault_plan_is_validated() -> None:
    with pytest.raises(errors.InvalidArgument, match="'explode'"):
        FaultPlan(rank=0, action="explode")
    with pytest.raises(errors.InvalidArgument, match="'sum'"):
        FaultPlan(rank=0, action="disconnect", at="sum")
    with pytest.raises(errors.InvalidArgument, match="chunk_bytes: got 0, expected an integer"):
        FaultPlan(rank=0, action="throttle", chunk_bytes=0)
    nowhere = FaultPlan(rank=1, action="disconnect", timestamp_file="/nowhere/at")
    with pytest.raises(errors.InvalidArgument, match="to '/nowhere/at': No such file"):
        run_ranks(3, len, faults=[nowhere], timeout_s=2.0)
    with pytest.raises(errors.InvalidArgument, match="got rank 3, expected 0 to 2"):
        run_ranks(3, len, faults=[FaultPlan(rank=3, action="disconnect")])
    with pytest.raises(errors.InvalidArgument, match="processes=True"):
        run_ranks(3, len, faults=[FaultPlan(rank=1, action="kill")])


def poll_status(group: Group) -> Any:
    """Rank 0 polls status between two calls, until rank 1 reports that it waits in the second."""
    pycomm.barrier(group=group)
    if group.rank == 1:
        return pycomm.recv(np.empty(1), 0, group=group)
    while "call 2" not in (found := status(group))["peers"][0]["current_call"]:
        time.sleep(0.01)  # polling interval: status has no notification
    pycomm.send(np.ones(1), 1, group=group)
    return found


def test_status_reports_each_rank_current_call() -> None:
    started = time.monotonic()
    found, _ = run_ranks(2, poll_status, transport="tcp", heartbeat_s=HEARTBEAT_S)
    assert found["rank"] == 0
    assert found["current_call"] == "outside of calls, after call 1, barrier()"
    (peer,) = found["peers"]
    assert peer["rank"] == 1
    assert peer["pid"] == os.getpid()
    assert peer["transport"] == "tcp"
    assert peer["connected"]
    assert peer["left_reason"] == ""
    assert peer["bytes_written"] >= 32
    assert peer["bytes_received"] >= 32
    assert 0 <= peer["last_seen_s"] < time.monotonic() - started
    assert peer["current_call"].startswith("inside call 2, recv(float64, count 1")


def test_run_ranks_raises_the_cause_although_a_consequence_came_first() -> None:
    def fn(group: Group) -> None:
        if group.rank == 1:
            others = [thread for thread in threading.enumerate() if thread.name == "rank 0"]
            group.close()
            for thread in others:
                thread.join()  # it failed, and reported it
            raise ValueError("the cause")
        pycomm.barrier(group=group)

    with pytest.raises(ValueError, match="the cause"):
        run_ranks(2, fn)


def test_rate_limited_link_delays_data() -> None:
    """In each direction, in the group and in a subgroup."""
    speed, x = 10e6, np.zeros(600_000, np.float32)
    burst = 0.02 * speed

    def program(group: Group) -> list[float]:
        found = []
        for one in (group, group.split(0)):
            pycomm.barrier(group=one)
            start = time.perf_counter()
            if group.rank == 0:
                pycomm.send(x, 1, group=one)
            else:
                pycomm.recv(np.empty_like(x), 0, group=one)
            found.append(time.perf_counter() - start)
        return found

    for seconds in run_ranks(2, program, transport="tcp", link_bytes_per_s=speed)[1]:
        assert seconds > (x.nbytes - 2 * burst) / speed
    with pytest.raises(errors.InvalidArgument, match="invalid link_bytes_per_s: got 0"):
        run_ranks(2, program, link_bytes_per_s=0)
