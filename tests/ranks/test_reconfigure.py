"""The groups of a process group with enable_reconfigure=True, without torch: handles, uuids, order
and failures. Ranks are threads. tests/torch_backend/test_c10d_reconfigure.py has torch's side."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import core_groups
import numpy as np
import pytest

from pycomm import _core, errors
from pycomm._bootstrap import elastic_store, reconfigure
from pycomm._bootstrap.reconfigure import Membership

LIMIT_S = 60.0
SHORT_S = 1.0  # for a group that cannot form

REGISTERED: list[tuple[str, int]] = []  # group, rank
LOCK = threading.Lock()


def connect(
    store: _core.Store, name: str, rank: int, size: int, timeout_s: float, secret: str = ""
) -> _core.Group:
    return core_groups.connect(store, rank, size, name=name, timeout_s=timeout_s, secret=secret)


def register(core: _core.Group, _store: _core.TcpStore) -> Callable[[], None]:
    entry = (core.name, core.rank)
    with LOCK:
        REGISTERED.append(entry)

    def unregister() -> None:
        with LOCK:
            REGISTERED.remove(entry)

    return unregister


def members(count: int, secret: str = "", towards: str = "127.0.0.1") -> list[Membership]:
    return [Membership(connect, register, secret, towards) for _ in range(count)]


Task = tuple[Membership, int, Sequence[str], bool, float]


def join(task: Task) -> _core.Group:
    membership, uuid, handles, ordered, timeout_s = task
    form = membership.prepare(uuid, handles, ordered)
    return _core.group_of(form(timeout_s))


def form_all(tasks: Sequence[Task]) -> list[_core.Group | BaseException]:
    """The groups that the ranks form at once, or their errors."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        futures: list[Future[_core.Group]] = [pool.submit(join, task) for task in tasks]
        return [future.exception() or future.result() for future in futures]


def formed(
    ranks: Sequence[Membership], uuid: int, handles: Sequence[str], ordered: bool = True
) -> list[_core.Group]:
    groups = []
    for one in form_all([(rank, uuid, handles, ordered, LIMIT_S) for rank in ranks]):
        if isinstance(one, BaseException):
            raise one
        groups.append(one)
    return groups


def check_works(groups: Sequence[_core.Group]) -> None:
    """All ranks take part in a sum."""

    def add(core: _core.Group) -> float:
        x, y = np.full(3, core.rank + 1, np.float32), np.empty(3, np.float32)
        _core.Call("all_reduce").run(core, x, y)
        return float(y[0])

    with ThreadPoolExecutor(len(groups)) as pool:
        sums = list(pool.map(add, groups))
    assert sums == [len(groups) * (len(groups) + 1) / 2] * len(groups)


@pytest.mark.parametrize("secret", ["", "s" * 64])
@pytest.mark.parametrize("towards", ["127.0.0.1", ""])
def test_ranks_follow_the_list_and_groups_shrink_and_grow(secret: str, towards: str) -> None:
    ranks = members(4, secret, towards)
    for uuid, order in enumerate([[2, 0, 1], [1, 2], [3, 1, 0, 2], [3]]):
        handles = [ranks[i].handle for i in order]
        groups = formed([ranks[i] for i in order], uuid, handles)
        assert [core.rank for core in groups] == list(range(len(order)))
        check_works(groups)
        assert {(core.name, core.rank) for core in groups} <= set(REGISTERED)
        for core in groups:
            core.close()
    for rank in ranks:
        rank.unregister()
    assert REGISTERED == []


def test_ranks_of_a_set_follow_its_order_on_all_ranks() -> None:
    ranks = members(3)
    handles = [rank.handle for rank in ranks]
    orders = [handles, handles[::-1], [handles[1], handles[2], handles[0]]]
    tasks = [(rank, 7, order, False, LIMIT_S) for rank, order in zip(ranks, orders, strict=True)]
    groups = [one for one in form_all(tasks) if isinstance(one, _core.Group)]
    assert [core.rank for core in groups] == [sorted(handles).index(one) for one in handles]
    check_works(groups)


def test_invalid_arguments_are_explained() -> None:
    (rank,) = members(1)
    (other,) = members(1)
    for handles, why in [
        ([], "no handles"),
        ([rank.handle, rank.handle], "occurs twice"),
        ([rank.handle, "gloo:0:1:0:"], "invalid handle 'gloo:0:1:0:'"),
        ([other.handle], "do not contain that of this rank"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=why):
            rank.prepare(1, handles, True)
    rank.prepare(1, [rank.handle], True)
    with pytest.raises(RuntimeError, match="uuid 1 was already used"):
        rank.prepare(1, [rank.handle], True)


def test_an_absent_rank_is_named_and_the_next_uuid_works() -> None:
    ranks = members(3)
    handles = [rank.handle for rank in ranks]
    first, second = form_all([(rank, 1, handles, True, SHORT_S) for rank in ranks[:2]])
    for error in (first, second):
        assert isinstance(error, errors.Timeout)
        assert "these did not join: 2" in str(error)
        assert "fresh uuid" in str(error)
    (third,) = form_all([(ranks[2], 2, handles, True, SHORT_S)])
    assert isinstance(third, errors.Timeout)
    assert "rank 0 of the new group, at 127.0.0.1:" in str(third)
    check_works(formed(ranks, 3, handles))


def test_a_rank_0_that_ended_is_named() -> None:
    gone, rank = members(2)
    handles = [gone.handle, rank.handle]
    del gone  # and its store
    (error,) = form_all([(rank, 1, handles, True, SHORT_S)])
    assert isinstance(error, errors.Timeout)
    assert "rank 0 of the new group, at 127.0.0.1:" in str(error)
    assert "handles of live processes" in str(error)


def test_lists_that_differ_form_no_group() -> None:
    ranks = members(2)
    handles = [rank.handle for rank in ranks]
    (third,) = members(1)
    first, second = form_all(
        [
            (ranks[0], 1, handles, True, SHORT_S),
            (ranks[1], 1, [*handles, third.handle], True, SHORT_S),
        ]
    )
    assert isinstance(first, errors.Timeout)
    assert isinstance(second, errors.Mismatch)
    assert "differ from those of rank 0" in str(second)


def test_a_handle_admits_only_processes_with_the_secret() -> None:
    """With a secret a handle is no key; without one it is."""
    (rank,) = members(1, "s" * 64)
    (intruder,) = members(1, "t" * 64)
    (error,) = form_all([(intruder, 1, [rank.handle, intruder.handle], True, SHORT_S)])
    assert isinstance(error, errors.Timeout)
    host, port, token = rank.handle.split("/")[1:]
    with pytest.raises(errors.Timeout, match="does not hold the same key"):
        _core.TcpStore.connect(host, int(port), token, SHORT_S)
    assert _core.TcpStore.connect(host, int(port), "s" * 64, LIMIT_S).add("x", 1) == 1
    (open_rank,) = members(1)
    host, port, token = open_rank.handle.split("/")[1:]
    assert _core.TcpStore.connect(host, int(port), token, LIMIT_S).add("x", 1) == 1


def test_a_host_without_a_network_uses_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = elastic_store.serve

    def no_route(towards: str, loopback: bool, key: str, generation: int) -> object:
        if not loopback:
            raise OSError(101, "Network is unreachable")
        return serve(towards, loopback, key, generation)

    monkeypatch.setattr(elastic_store, "serve", no_route)
    (rank,) = members(1, towards="")
    assert rank.handle.startswith("pycomm/127.0.0.1/")
    assert reconfigure.ordered([rank.handle], True) == [rank.handle]
