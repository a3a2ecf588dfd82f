"""Group.replace() and Group.grow(): processes join a group, and any rank may die, the first too.

Ranks are processes that are killed, also in the middle of replace() and grow().
"""

import os
import select
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_ranks import (
    CALL_S,
    LIMIT_S,
    SECRET,
    ElasticRun,
    check_works,
    die,
    die_at,
    until_broken,
    wait_until,
)
from sample import of_the_day

import pycomm
from pycomm import errors
from pycomm._bootstrap import elastic_store
from pycomm._bootstrap.elastic_store import SurvivingStore
from pycomm._bootstrap.shrink import Ballot

# Where a process dies, as arguments of die_at().
ASKED = ("get", "elastic/answer")
ANSWERED = ("add", "/formed/")
FORMING = ("get", "/rank_info/")
VOTED = ("add", "/shrink/came", True)
DECIDES = ("claim", "/shrink/decided")
DECIDED = ("claim", "/shrink/decided", True)
INVITED = ("set", "elastic/answer", True)
DEATHS = [(stage, i) for stage in (VOTED, DECIDES, DECIDED, INVITED, FORMING) for i in (0, 1)]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "group")


def lose(init: Any, victims: list[int], stages: dict[int, Any]) -> Any:
    """`victims` die after a call, and are replaced; others die at a stage of that."""
    group = init()
    pycomm.all_reduce(np.ones(1000))
    if group.rank in victims:
        die()
    processes = [os.pidfd_open(group.peer_info()[rank].pid) for rank in stages]
    until_broken(group)
    if group.rank in stages:
        die_at(*stages[group.rank])
    else:
        wait_before_claim(processes)
    replaced = group.replace()
    with pytest.raises(errors.GroupBroken):
        pycomm.barrier(group=group)  # the first cause remains
    return check_works(replaced)


def wait_before_claim(processes: list[int]) -> None:
    """Lets this rank decide only after these processes ended."""
    claim = Ballot.claim

    def claim_later(ballot: Any, decision: Any) -> Any:
        for process in processes:
            select.select([process], [], [])
        return claim(ballot, decision)

    Ballot.claim = claim_later  # type: ignore[method-assign]  # of this process


def join(init: Any, *stage: Any) -> Any:
    """Joins, or dies at a stage of that."""
    if stage:
        die_at(*stage)
    return check_works(init())


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_new_process_takes_the_rank_of_a_dead_one(file: str, victim: int) -> None:
    with ElasticRun(file, 3) as run:
        run.start_ranks(lose, [victim], {})
        run.start_joiner("new", join)
        results = run.wait_for()
    assert results.pop(f"rank {victim}") is None
    assert results.pop("new") == (victim, 3, [victim], [0, 1, 2])
    for name, (rank, *group) in results.items():
        assert name == f"rank {rank}", "survivors keep their ranks"
        assert group == [3, [victim], [0, 1, 2]]


def test_processes_get_the_ranks_that_they_ask_for(file: str) -> None:
    with ElasticRun(file, 5) as run:
        run.start_ranks(lose, [1, 3], {})
        run.start_joiner("third", join, rank=3)
        run.start_joiner("any", join)
        results = run.wait_for()
    assert results["third"] == (3, 5, [1, 3], [0, 1, 2, 3, 4])
    assert results["any"] == (1, 5, [1, 3], [0, 1, 2, 3, 4])


def lose_in_turn(init: Any, victims: list[int], dies: bool) -> Any:
    """Ranks die in turn, and are replaced; this process is the next of them if `dies`."""
    group = init()
    for victim in victims:
        pycomm.all_reduce(np.ones(1000))
        if dies and group.rank == victim:
            die()
        until_broken(group)
        group = group.replace()
    return check_works(group)


def test_every_rank_is_replaced_in_turn(file: str) -> None:
    """At the end no process of the first group lives: its store moved three times."""
    with ElasticRun(file, 3) as run:
        run.start_ranks(lose_in_turn, [0, 1, 2], True)
        for victim in range(3):
            left = list(range(victim + 1, 3))
            run.start_joiner(f"new {victim}", lose_in_turn, left, False, rank=victim)
            run.wait_for(f"rank {victim}")
        results = run.wait_for()
    for rank in range(3):
        assert results[f"rank {rank}"] is None
        assert results[f"new {rank}"] == (rank, 3, [2], [0, 1, 2])


@pytest.mark.parametrize("stage", [ASKED, ANSWERED, FORMING])
@pytest.mark.parametrize(("size", "victim"), [(2, 0), (3, 2)])
def test_a_process_that_dies_while_it_joins_is_replaced(
    file: str, stage: Any, size: int, victim: int
) -> None:
    with ElasticRun(file, size, form_s=0.5) as run:
        run.start_ranks(lose, [victim], {})
        run.start_joiner("dies", join, *stage)
        assert run.wait_for("dies") == {"dies": None}
        run.start_joiner("new", join)
        results = run.wait_for()
    assert results["new"] == (victim, size, [victim], list(range(size)))


@pytest.mark.parametrize(("stage", "second"), of_the_day(DEATHS, 2))
def test_a_survivor_dies_in_replace(file: str, stage: Any, second: int) -> None:
    """Rank 3 of 5 dies, then in replace() another one, which serves the store if it is rank 0."""
    with ElasticRun(file, 5, form_s=0.5) as run:
        run.start_ranks(lose, [3], {second: stage})
        run.start_joiner("one", join)
        run.start_joiner("two", join)
        results = run.wait_for()
    alive = [found for found in results.values() if found is not None]
    assert sorted(found[0] for found in alive) == [0, 1, 2, 3, 4]
    assert all(found[1] == 5 and found[3] == [0, 1, 2, 3, 4] for found in alive)


def shrink_and_grow(init: Any) -> Any:
    group = init()
    pycomm.all_reduce(np.ones(1000))
    if group.rank == 0:
        die()
    until_broken(group)
    smaller = group.replace(wait_s=0.0)
    return check_works(smaller), check_works(smaller.grow())


def test_without_new_processes_the_survivors_continue_and_grow_later(file: str) -> None:
    with ElasticRun(file, 3) as run:
        run.start_ranks(shrink_and_grow)
        wait_until(lambda: len(elastic_store.read_file(file)) == 2)
        run.start_joiner("new", join)
        results = run.wait_for()
    assert results["rank 1"] == ((0, 2, [], [1, 2]), (0, 3, [2], [1, 2, 3]))
    assert results["new"] == (2, 3, [2], [1, 2, 3])


def grow(init: Any, counts: list[int]) -> Any:
    group = init()
    found = [check_works(group)]
    for count in counts:
        larger = group.grow(count)
        with pytest.raises(errors.GroupBroken, match="closed"):
            pycomm.barrier(group=group)
        found.append(check_works(larger))
        group = larger
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_a_group_grows(file: str, size: int) -> None:
    """By one process, then by two, which are numbered in the order of arrival or as they ask."""
    with ElasticRun(file, size) as run:
        run.start_ranks(grow, [1, 2])
        run.start_joiner("first", grow, [2])
        wait_until(lambda: len(elastic_store.read_file(file)) == size + 1)
        run.start_joiner("second", join, rank=size + 2)
        run.start_joiner("third", join)
        results = run.wait_for()
    ranks = list(range(size + 3))
    assert results["second"] == (size + 2, size + 3, [size + 1, size + 2], ranks)
    assert results["third"] == (size + 1, size + 3, [size + 1, size + 2], ranks)
    assert results["first"] == [
        (size, size + 1, [size], ranks[: size + 1]),
        (size, size + 3, [size + 1, size + 2], ranks),
    ]
    for rank in range(size):
        assert results[f"rank {rank}"] == [
            (rank, size, [], ranks[:size]),
            (rank, size + 1, [size], ranks[: size + 1]),
            (rank, size + 3, [size + 1, size + 2], ranks),
        ]


def grow_until_joined(init: Any, timeout_s: float) -> Any:
    """Calls grow() until it succeeds; until then the group is usable as before. Returns the first
    error, and check_works()."""
    group, first = init(), ""
    while True:
        try:
            return first, check_works(group.grow(timeout_s=timeout_s))
        except (errors.Timeout, errors.PeerLost) as raised:
            first = first or f"{type(raised).__name__}: {raised}"
            check_works(group)
            Path(os.environ["FAILED_ONCE"]).touch()


def test_a_group_that_no_process_joins_stays_usable(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = tmp_path / "failed"
    monkeypatch.setenv("FAILED_ONCE", str(failed))
    with ElasticRun(file, 2) as run:
        run.start_ranks(grow_until_joined, 2.0)
        wait_until(failed.exists)
        run.start_joiner("new", join)
        results = run.wait_for()
    error, found = results["rank 0"]
    assert error.startswith('Timeout: grow: "world" stays as it is: 0 of 1 processes asked to join')
    assert found == (0, 3, [2], [0, 1, 2])
    assert results["new"] == (2, 3, [2], [0, 1, 2])


def merge_into(init: Any, file: str, stage: Any) -> Any:
    """All ranks of this group join another one; rank 1 dies at a stage of that, if any."""
    group = init()
    rank = group.rank
    assert check_works(group)[1] == 2
    pycomm.shutdown()
    if stage and rank == 1:
        die_at(*stage)
    return check_works(pycomm.join(file, secret=SECRET, timeout_s=CALL_S))


def take_in(init: Any, count: int) -> Any:
    """Grows by `count` processes, or by those that live."""
    group = init()
    check_works(group)
    while True:
        try:
            return check_works(group.grow(count, timeout_s=LIMIT_S))
        except errors.PeerLost:  # a rank died: that is tried
            check_works(group)
            count -= 1


@pytest.mark.parametrize("stage", [None, ANSWERED])
def test_two_groups_merge(file: str, stage: Any) -> None:
    """Also if a rank of the one that is taken in dies meanwhile."""
    with ElasticRun(file, 2) as run, ElasticRun(f"{file}.other", 2) as other:
        run.start_ranks(take_in, 2)
        wait_until(lambda: len(elastic_store.read_file(file)) == 2)
        other.start_ranks(merge_into, file, stage)
        results = [*run.wait_for().values(), *other.wait_for().values()]
    size = 3 if stage else 4
    new = list(range(2, size))
    found = sorted(one for one in results if one is not None)
    assert found == [(rank, size, new, list(range(size))) for rank in range(size)]


def return_later(init: Any, file: str) -> Any:
    """Rank 2 is stopped while the others continue; it may not, and joins them."""
    group = init()
    pycomm.all_reduce(np.ones(1000))
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        until_broken(group)
        with pytest.raises(errors.GroupBroken, match=r"continued without this|too few"):
            group.replace()
        pycomm.shutdown()
        return check_works(pycomm.join(file, secret=SECRET, timeout_s=CALL_S))
    until_broken(group)
    smaller = group.replace(timeout_s=10.0, wait_s=0.0)
    assert check_works(smaller)[1] == 2
    Path(f"{file}.continued").touch()
    return check_works(smaller.grow())


def test_a_rank_that_was_cut_off_returns(file: str) -> None:
    with ElasticRun(file, 3, form_s=0.5, heartbeat_s=1.0) as run:
        run.start_ranks(return_later, file)
        wait_until(lambda: os.path.exists(f"{file}.continued"))
        os.kill(run.processes["rank 2"].pid, signal.SIGCONT)
        results = run.wait_for()
    assert results["rank 2"] == (2, 3, [2], [0, 1, 2])


def form_with_a_slow_rank(init: Any, left: Path) -> Any:
    """Rank 2 learns the others' stores late; no rank ends its init() before."""
    exchange = elastic_store.exchange_servers

    def late(core: Any, own: Any) -> Any:
        if core.rank == 2:
            time.sleep(0.3)  # the time in which another rank would leave
            assert not left.exists()
        return exchange(core, own)

    elastic_store.exchange_servers = late
    group = init()
    left.touch()
    return check_works(group)


def test_all_know_the_stores_of_all_before_a_rank_may_die(file: str, tmp_path: Path) -> None:
    """If rank 0 died before, the store that had the addresses would be gone."""
    with ElasticRun(file, 3) as run:
        run.start_ranks(form_with_a_slow_rank, tmp_path / "left")
        assert len(run.wait_for()) == 3


def lose_in_grow(init: Any, victim: int, *stage: Any) -> Any:
    """A rank dies in grow(): the others raise its number, and replace it."""
    group = init()
    if group.rank == victim:
        die_at(*stage)
    return replace_after_grow(group, f"rank {victim} .*died|the store|did not form")


def replace_after_grow(group: Any, message: str) -> Any:
    with pytest.raises(errors.PeerLost, match=message):
        group.grow()
    until_broken(group)
    return check_works(group.replace())


@pytest.mark.parametrize("stage", [VOTED, FORMING])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_in_grow_is_named_and_replaced(file: str, stage: Any, victim: int) -> None:
    with ElasticRun(file, 3, form_s=0.5) as run:
        run.start_ranks(lose_in_grow, victim, *stage)
        run.start_joiner("new", join)
        assert run.wait_for()["new"] == (victim, 3, [victim], [0, 1, 2])


def join_stopped(init: Any) -> Any:
    """Stops when it has the answer; continues after the others did without it."""
    call = SurvivingStore._call

    def stop(store: Any, limit_s: float, verb: str, key: str, *rest: Any) -> Any:
        answer = call(store, limit_s, verb, key, *rest)
        if verb == "get" and "elastic/answer" in key:
            SurvivingStore._call = call  # type: ignore[method-assign]  # of this process
            os.kill(os.getpid(), signal.SIGSTOP)
        return answer

    SurvivingStore._call = stop  # type: ignore[method-assign]  # of this process
    return check_works(init())


def lose_twice(init: Any) -> Any:
    """Rank 1 dies, and after it was replaced rank 2."""
    group = init()
    for victim in (1, 2):
        pycomm.all_reduce(np.ones(1000))
        if group.rank == victim:
            die()
        until_broken(group)
        group = group.replace()
    return check_works(group)


def join_and_lose(init: Any) -> Any:
    group = init()
    pycomm.all_reduce(np.ones(1000))
    until_broken(group)
    return check_works(group.replace())


def test_a_process_that_stops_while_it_joins_joins_later(file: str) -> None:
    """Another process gets its rank; it asks again, and gets the next one."""
    with ElasticRun(file, 3, form_s=0.5) as run:
        run.start_ranks(lose_twice)
        run.start_joiner("stops", join_stopped)
        stopped = run.processes["stops"].pid
        wait_until(lambda: Path(f"/proc/{stopped}/stat").read_text().split()[2] == "T")
        run.start_joiner("new", join_and_lose, rank=1)
        run.wait_for("rank 2")
        os.kill(stopped, signal.SIGCONT)
        results = run.wait_for()
    assert results["new"] == (1, 3, [2], [0, 1, 2])
    assert results["stops"] == (2, 3, [2], [0, 1, 2])


def refused(init: Any, secret: str) -> str:
    with pytest.raises(errors.PeerLost) as raised:
        init(secret=secret)
    return str(raised.value)


def test_a_process_without_the_secret_cannot_join(file: str) -> None:
    with ElasticRun(file, 2) as run:
        run.start_ranks(lose, [1], {})
        run.start_joiner("unauthenticated", refused, "fedcba9876543210" * 4)
        text = run.wait_for("unauthenticated")["unauthenticated"]
        run.start_joiner("new", join)
        run.wait_for()
    assert "no rank of the elastic group can be reached" in text
    assert "does not hold the same key" in text
