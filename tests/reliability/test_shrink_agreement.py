"""Survivors with partial connectivity, and with reused process ids."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from host_runs import Run

import pycomm
from pycomm import Group, _core
from pycomm._bootstrap import shrink
from pycomm._bootstrap.joining import report_place, reported
from pycomm.bench.support.netns import Network, missing
from pycomm.testing import run_ranks

WHY_NOT = missing()
LIMIT_S = 60.0


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_two_survivors_cannot_connect_and_the_others_continue() -> None:
    """Ranks 1 and 2 lose the route to each other after the group was formed; both reach rank 0."""
    with Network(3, ipv6=False) as net:
        run = Run(net, [0, 1, 2], "shrinking").start_all()
        for process in run.ranks.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for here, there in ((1, 2), (2, 1)):
            net.hosts[here].run("ip", "route", "add", "blackhole", f"{net.hosts[there].ipv4()}/32")
        for process in run.ranks.values():
            assert process.stdin is not None
            process.stdin.write("continue\n")
            process.stdin.flush()
        results = run.results()
    *others, excluded = results
    print([result["took_s"] for result in results])
    assert [one["ranks"] for one in others] == [[0, 1], [0, 1]], others
    assert excluded["error"] == "PeerLost", excluded
    assert "rank 1 (host" in excluded["text"], excluded
    assert "rank 2 (host" in excluded["text"], excluded
    assert "could not connect to each other" in excluded["text"]
    assert excluded["peer"] == 1
    assert all(one["took_s"] < 30 for one in results), "of a timeout of 60 s"


def started(pid: int) -> int:
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[19])


def start_times(group: Group) -> bool:
    pycomm.barrier(group=group)
    right = [member.started == started(member.pid) for member in group.peer_info()]
    pycomm.barrier(group=group)
    return all(right)


def test_peer_info_has_start_times() -> None:
    assert run_ranks(2, start_times, transport="shm", processes=True) == [True, True]


def test_reused_process_id_is_reported_dead() -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        now = started(child.pid)

        def seen(began: int) -> bool:
            member = SimpleNamespace(pid=child.pid, visible=True, started=began)
            core: Any = SimpleNamespace(members=[member])
            with shrink.processes_of(core) as (descriptor,):
                return shrink.has_ended(descriptor)

        assert [seen(now), seen(0), seen(now - 1)] == [False, False, True]
        before = len(os.listdir("/proc/self/fd"))
        seen(now - 1)
        assert len(os.listdir("/proc/self/fd")) == before
        child.communicate(b"\n")


class Counting:
    """A store that counts its calls. `wait` gives the limit of each wait for a key."""

    def __init__(self, store: Any, wait: Callable[[], float]) -> None:
        self.store, self.calls, self.wait = store, 0, wait

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self.store, name)

    def get(self, key: str, timeout_s: float) -> bytes:
        self.calls += 1
        value: bytes = self.store.get(key, self.wait() if timeout_s else 0.0)
        return value


def driver(store: Any, rank: int, size: int, end: float, lost: list[int], ended: list[int]) -> Any:
    """That of shrink(); `ended`: ranks whose processes this one sees."""
    core: Any = SimpleNamespace(
        name="world", rank=rank, size=size, ranks=list(range(size)), lost=lambda: lost
    )
    processes = [-1 if one in ended else None for one in range(size)]
    return shrink._ShrinkDriver(core, store, processes, end, None, None)


def forming(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Groups form at once: Group.ranks of each."""
    formed: list[list[int]] = []

    def form(*given: Any) -> Any:
        formed.append(given[4])
        return given[0]

    monkeypatch.setattr(shrink, "_core", SimpleNamespace(regroup=form))
    return formed


def test_polling_unchanged_votes_is_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 ranks one has voted; 50 polls, of which the first reads all."""
    clock, looks = [0.0], [0]

    def wait() -> float:
        clock[0] += 1e-6
        looks[0] += 1
        if looks[0] == 50:
            clock[0] = 100.0
        return 0.0

    store: Any = Counting(_core.LocalStore(), wait)
    monkeypatch.setattr(shrink, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with pytest.raises(pycomm.errors.GroupBroken, match="too few"):
        driver(store, 0, 200, 50.0, [5], []).run()
    assert looks[0] == 50
    assert store.calls < 250, "up to 60 in each of two full reads, two in each other poll"


def test_survivors_agree_by_few_calls_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 7 of 8 ended. The others wait for the decision of the last one that comes."""
    shared, end = _core.LocalStore(), time.monotonic() + LIMIT_S
    formed = forming(monkeypatch)

    def survive(rank: int) -> int:
        store: Any = Counting(shared, lambda: LIMIT_S)
        driver(store, rank, 8, end, [7], [7]).run()
        return int(store.calls)

    with ThreadPoolExecutor(7) as pool:
        calls = list(pool.map(survive, range(7)))
    assert formed == [list(range(7))] * 7
    assert max(calls) <= 11, calls


def test_a_rank_that_ended_on_another_host_is_read_from_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 sees that the process of rank 2 ended; rank 1 does not, and decides at once."""
    shared, waits, end = _core.LocalStore(), threading.Event(), time.monotonic() + LIMIT_S
    formed = forming(monkeypatch)

    def wait() -> float:
        waits.set()
        return LIMIT_S

    def never() -> float:
        raise AssertionError("rank 1 waits")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(driver(Counting(shared, wait), 0, 3, end, [], [2]).run)
        assert waits.wait(LIMIT_S)
        driver(Counting(shared, never), 1, 3, end, [], []).run()
        first.result()
    assert formed == [[0, 1], [0, 1]]


def test_reports_about_ranks_share_numbers_of_the_store() -> None:
    """Each rank reports each other one, several times."""
    for size in (2, 8, 100):
        sums: Counter[int] = Counter()
        for rank in range(0, size, 2):
            number, one = report_place(rank, size)
            sums[number] += 4 * size * one
        assert reported(sums, size) == set(range(0, size, 2))
        assert max(sums.values()) < 1 << 63
