"""Group.shrink(): the survivors continue, for any failed rank and moment; a minority never does.

Ranks are processes; they die by kill -9, in the middle of calls and of shrink() itself.
"""

import os
import select
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_ranks import until_broken

import pycomm
from pycomm import Group, errors, testing
from pycomm._bootstrap import shrink
from pycomm.testing import FaultPlan, run_ranks

TRANSPORTS = ["shm", "tcp"]


@pytest.fixture(autouse=True)
def _long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors have the whole time of the test."""
    monkeypatch.setattr(testing, "EXIT_TIMEOUT_S", 90.0)


def die(group: Group, *others: int) -> None:
    """Kills this process, and `others` before it, in a call that all have started: no rank is still
    forming the group."""
    pycomm.all_reduce(np.ones(1 << 16, np.float32), "max", group=group)
    for rank in (*others, group.rank):
        os.kill(group.peer_info()[rank].pid, signal.SIGKILL)


def check_works(group: Group) -> list[int]:
    """All ranks of the new group take part in its calls; returns their ranks in the first group."""
    mine = np.array([group.ranks[group.rank]])
    assert pycomm.all_gather(mine, group=group).ravel().tolist() == group.ranks
    assert pycomm.all_reduce(np.ones(50_000), group=group)[-1] == group.size
    part = group.split(group.rank % 2)
    assert part is not None
    pycomm.barrier(group=part)
    return group.ranks


def continue_with_survivors(group: Group, victims: list[int]) -> Any:
    """Works until a rank is lost, then with the survivors."""
    if len(victims) > 1 and group.rank == victims[0]:
        die(group, *victims[1:])
    error = until_broken(group)
    start = time.monotonic()
    smaller = group.shrink()
    took = time.monotonic() - start
    with pytest.raises(errors.GroupBroken):
        pycomm.barrier(group=group)  # the first cause remains
    assert pycomm.size() == smaller.size, "it is the default group"
    assert smaller.ranks[smaller.rank] == group.rank
    return check_works(smaller), smaller.name, took, type(error).__name__


def run_with_deaths(n: int, transport: str, victims: list[int]) -> list[Any]:
    """One victim is killed in the middle of an all_reduce, several while the others are in one;
    returns the results of the survivors."""
    fault = FaultPlan(victims[0], "kill", at="all_reduce", after_bytes=3 << 16)
    results = run_ranks(
        n, continue_with_survivors, victims, transport=transport, processes=True,
        faults=[fault] if len(victims) == 1 else [], return_exceptions=True,
    )  # fmt: skip
    for rank in victims:
        assert isinstance(results[rank], errors.PeerLost), results[rank]
    left = [rank for rank in range(n) if rank not in victims]
    for rank in left:
        assert not isinstance(results[rank], BaseException), results[rank]
        ranks, name, _, _ = results[rank]
        assert ranks == left
        assert name == results[left[0]][1]
    return [results[rank] for rank in left]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("n", "victims"), [(2, [1]), (4, [0]), (8, [3, 6])])
def test_survivors_of_a_kill_continue(transport: str, n: int, victims: list[int]) -> None:
    run_with_deaths(n, transport, victims)


def die_while_shrinking(group: Group, moment: str) -> Any:
    """Rank 3 dies in a call, and rank 1 at this stage of the following shrink()."""
    if group.rank == 3:
        die(group)
    process = os.pidfd_open(group.peer_info()[1].pid)
    until_broken(group)

    def die_here(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    choose = shrink.Ballot.claim

    def choose_second(election: Any, here: set[int]) -> list[int]:
        select.select([process], [], [])  # until rank 1 died
        return choose(election, here)

    if moment == "as it chooses" and group.rank != 1:
        shrink.Ballot.claim = choose_second
    if group.rank == 1:
        if moment == "before the choice":  # it has voted, and the others saw it
            shrink.Ballot._read_store = die_here
        elif moment == "as it chooses":
            shrink.Ballot.claim = die_here
        else:  # the others wait for it in the new group
            pycomm._core.regroup = die_here
    return check_works(group.shrink())


@pytest.mark.parametrize("moment", ["before the choice", "as it chooses", "before it meets"])
def test_shrink_survives_a_rank_failure(moment: str) -> None:
    results = run_ranks(
        5, die_while_shrinking, moment, transport="shm", processes=True, return_exceptions=True
    )
    assert [results[rank] for rank in (0, 2, 4)] == [[0, 2, 4]] * 3, results


def lose_one_after_another(group: Group) -> Any:
    """Of four ranks two die one after the other: the remaining group can be shrunk again."""
    if group.rank == 3:
        die(group)
    until_broken(group)
    three = group.shrink()
    if group.rank == 0:
        die(three)
    until_broken(three)
    two = three.shrink()
    return two.name, check_works(two)


def test_a_group_can_be_shrunk_again() -> None:
    results = run_ranks(
        4, lose_one_after_another, transport="tcp", processes=True, return_exceptions=True
    )
    assert results[1:3] == [("world~2", [1, 2])] * 2, results


def be_a_minority(group: Group, folder: str) -> Any:
    """Ranks 1 to 3 are stopped, not dead; rank 0 must remain alone."""
    pids = [member.pid for member in group.peer_info()]
    pycomm.barrier(group=group)
    if group.rank:
        while not Path(folder, "over").exists():
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(errors.GroupBroken, match="too few"):
            group.shrink()
        return "GroupBroken"
    try:
        until_broken(group)
        with pytest.raises(errors.GroupBroken, match="too few of 4 ranks are left") as caught:
            group.shrink(timeout_s=1.0)
        return caught.value.op
    finally:
        Path(folder, "over").touch()
        for pid in pids[1:]:
            os.kill(pid, signal.SIGCONT)


def test_a_minority_never_continues(tmp_path: Path) -> None:
    results = run_ranks(
        4, be_a_minority, str(tmp_path), transport="tcp", processes=True, heartbeat_s=2.0,
        return_exceptions=True,
    )  # fmt: skip
    assert results == ["shrink", "GroupBroken", "GroupBroken", "GroupBroken"]


def be_excluded(group: Group, folder: str) -> Any:
    """Rank 2 is stopped until the others continued without it."""
    victim = group.peer_info()[2].pid
    if group.rank == 2:
        pycomm.barrier(group=group)
        while not Path(folder, "over").exists():
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(errors.GroupBroken, match="continued without this one"):
            group.shrink()
        return "late"
    pycomm.barrier(group=group)
    until_broken(group)
    smaller = group.shrink()
    ranks = check_works(smaller)
    if group.rank == 0:
        Path(folder, "over").touch()
        os.kill(victim, signal.SIGCONT)
    return ranks


def test_stopped_rank_is_excluded(tmp_path: Path) -> None:
    results = run_ranks(
        3, be_excluded, str(tmp_path), transport="shm", processes=True, heartbeat_s=2.0,
        return_exceptions=True,
    )  # fmt: skip
    assert results == [[0, 1], [0, 1], "late"]


def shrink_as_a_thread(group: Group) -> Any:
    """A lost connection between ranks that are threads: no rank died."""
    with pytest.raises(errors.Error):
        while True:
            pycomm.all_reduce(np.ones(9), group=group)
    return check_works(group.shrink())


def test_complete_group_shrinks_to_itself() -> None:
    """All living ranks take part, although a connection was lost; this needs no process."""
    results = run_ranks(
        3, shrink_as_a_thread, transport="local",
        faults=[FaultPlan(1, "disconnect", at="all_reduce", after_bytes=4096)],
    )  # fmt: skip
    assert results == [[0, 1, 2]] * 3


def test_invalid_timeout_is_rejected() -> None:
    group = run_ranks(1, lambda group: group)[0]
    with pytest.raises(errors.GroupBroken, match="it was closed"):
        group.shrink()

    def refused(group: Group) -> None:
        with pytest.raises(errors.InvalidArgument, match="more than 0 seconds"):
            group.shrink(timeout_s=0)

    run_ranks(1, refused)
