"""Survivors with partial connectivity, and with reused process ids."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from host_runs import Run

import pycomm
from pycomm import Group, _core
from pycomm._bootstrap import shrink
from pycomm.bench.support.netns import Network, missing
from pycomm.testing import run_ranks

WHY_NOT = missing()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_two_survivors_that_cannot_connect_are_named() -> None:
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
    for rank, result in enumerate(results):
        assert result["error"] == "PeerLost", result
        assert "rank 1 (host" in result["text"], result
        assert "rank 2 (host" in result["text"], result
        assert "could not connect to each other" in result["text"]
        assert result["peer"] == (1 if rank == 2 else 2)
        assert result["took_s"] < 30, "of a timeout of 60 s"


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
    """A store that counts its calls."""

    def __init__(self, store: Any) -> None:
        self.store, self.calls = store, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self.store, name)


def test_polling_unchanged_votes_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 ranks one has voted; 50 polls, of which the first reads all."""
    store: Any = Counting(_core.LocalStore())
    clock, looks = [0.0], [0]

    def pause(_: float) -> None:
        clock[0] += 1e-6
        looks[0] += 1
        if looks[0] == 50:
            clock[0] = 100.0

    monkeypatch.setattr(shrink, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=pause))
    election = shrink.SurvivorElection(store, "world", 0, 200, 50.0)
    with pytest.raises(pycomm.errors.GroupBroken, match="too few"):
        election.agree([None] * 200, [])
    assert looks[0] == 50
    assert store.calls < 1000, "2 x 200 for the first and the last poll, one for each other poll"
