"""Threads of the library: errors if no thread can be created, and calls that wait for one."""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_groups import connect
from thread_limit import no_new_threads

import pycomm
from pycomm import Group, _core, errors
from pycomm.testing import run_ranks

TRANSPORTS = ["shm", "tcp"]
KEY = "0123456789abcdef"


def start_without_threads(group: Group) -> list[Any]:
    """An asynchronous call that cannot start, then calls that can."""
    x = np.full(1 << 16, group.rank + 1.0, np.float32)
    pycomm.barrier(group=group)
    refused = ""
    with no_new_threads():
        try:
            pycomm.all_reduce(x, group=group, async_op=True)
        except errors.Unsupported as error:  # the result: its text is asserted
            refused = str(error)
    untouched = bool((x == group.rank + 1).all())
    del x
    gc.collect()
    y = np.full(1 << 16, group.rank + 1.0, np.float32)
    pycomm.all_reduce(y, group=group, timeout_s=10)
    work = pycomm.all_reduce(z := np.ones(1 << 16, np.float32), group=group, async_op=True)
    work.wait()
    return [refused, untouched, bool((y == 3).all()), bool((z == 2).all())]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_asynchronous_call_without_a_thread_is_rejected(transport: str) -> None:
    for refused, *right in run_ranks(2, start_without_threads, transport=transport, processes=True):
        assert "the thread pycomm-worker cannot be created: Resource temporarily" in refused
        assert "ulimit -u" in refused
        assert right == [True, True, True]


def sockets() -> int:
    """The number of sockets that this process has open."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(entry).startswith("socket:")
        except OSError:  # the descriptor that lists them
            continue
    return count


def close_without_threads(group: Group, folder: str) -> int:
    """Rank 0 closes while its bytes are in transit; returns how many sockets stayed open."""
    closed = Path(folder, "closed")
    if group.rank == 0:
        pipe = closed.open("wb", buffering=0)  # now: this process drops its privileges
        before = sockets()
        x = np.ones(1 << 24, np.float32)
        with no_new_threads():
            with pytest.raises(errors.Timeout):
                pycomm.send(x, 1, group=group, timeout_s=0.5)
            left = sockets() - before
        pipe.write(b"1")
        pipe.close()
        return left
    while not closed.exists() or closed.stat().st_size == 0:  # until then nothing is read
        time.sleep(0.01)  # polling interval
    return 0


def test_connection_without_a_thread_is_closed_immediately(tmp_path: Path) -> None:
    left, _ = run_ranks(2, close_without_threads, str(tmp_path), transport="tcp", processes=True)
    assert left == -1


def wait_behind_a_stuck_call(group: Group, folder: str) -> Any:
    """Rank 1 never makes the first call, behind which rank 0 waits with the second."""
    pycomm.barrier(group=group)
    over = Path(folder, "over")
    while group.rank == 1 and not over.exists():
        time.sleep(0.01)  # polling interval
    if group.rank == 1:
        return None
    work = pycomm.all_reduce(np.ones(4), group=group, async_op=True)
    start = time.monotonic()
    with pytest.raises(errors.Timeout) as late:
        pycomm.all_reduce(np.ones(4), group=group, timeout_s=1.0)
    waited = time.monotonic() - start
    with pytest.raises(errors.GroupBroken) as ended:
        work.wait()
    over.touch()
    return waited, str(late.value), str(ended.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_queued_call_times_out_at_its_own_limit(transport: str, tmp_path: Path) -> None:
    waited, late, ended = run_ranks(
        2, wait_behind_a_stuck_call, str(tmp_path), transport=transport, processes=True
    )[0]
    assert 0.9 < waited < 2.0
    assert "all_reduce: Timed out after 1.000000 s, waiting for calls of this rank" in late
    assert "aborted" in ended


def threads_and_descriptors() -> tuple[int, int]:
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


def refused(make: Callable[[], object]) -> list[Any]:
    """The error of what needs a thread that cannot be created, and whether nothing leaked."""
    before, text = threads_and_descriptors(), ""
    with no_new_threads():
        try:
            make()
        except errors.Unsupported as error:  # the result: its text is asserted
            text = str(error)
        gc.collect()
        return [text, threads_and_descriptors() == before]


def check_refused(results: list[Any], thread: str) -> None:
    for text, same in results:
        assert f"the thread {thread} cannot be created: Resource temporarily" in text
        assert same


def serve_without_threads(group: Group) -> list[Any]:
    """Serves a store."""
    pycomm.barrier(group=group)
    result = refused(lambda: _core.TcpStore.serve("127.0.0.1", 0, KEY))
    _core.TcpStore.serve("127.0.0.1", 0, KEY).set("key", b"value", 1.0)
    return result


def test_store_without_a_thread_is_rejected_and_leaks_nothing() -> None:
    check_refused(run_ranks(1, serve_without_threads, processes=True), "pycomm-store")


def split_without_threads(group: Group) -> list[Any]:
    """Forms a group, which has a heartbeat thread."""
    pycomm.barrier(group=group)
    return refused(lambda: group.split(0))


def test_group_without_a_heartbeat_thread_is_rejected_and_leaks_nothing() -> None:
    results = run_ranks(2, split_without_threads, transport="tcp", processes=True)
    check_refused(results, "pycomm-timer")


def connect_on_demand_without_threads(group: Group) -> list[Any]:
    """Forms a group whose ranks connect on demand, which needs a thread that listens."""
    served = _core.TcpStore.serve("127.0.0.1", 0, KEY) if group.rank == 0 else None
    port = np.array([served.port if served else 0])
    pycomm.broadcast(port, 0, group=group)
    store = served or _core.TcpStore.connect("127.0.0.1", int(port[0]), KEY, 10.0)
    pycomm.barrier(group=group)
    options: dict[str, Any] = {"secret": KEY, "transport": "tcp", "full_mesh": 1}
    result = refused(lambda: connect(store, group.rank, 2, **options))
    pycomm.barrier(group=group)
    return result


@pytest.mark.no_attack("who calls the store is a descriptor of rank 0, and those are counted")
def test_on_demand_group_without_a_thread_is_rejected() -> None:
    results = run_ranks(2, connect_on_demand_without_threads, transport="tcp", processes=True)
    check_refused(results, "pycomm-connect")
