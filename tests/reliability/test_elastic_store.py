"""Elastic groups in one process: the store, its file, requests to join, errors of arguments."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pycomm
from pycomm import _core, errors
from pycomm._bootstrap import elastic_store, shrink
from pycomm._bootstrap.elastic_store import Elastic, Server, StoreMoved, SurvivingStore
from pycomm._bootstrap.joining import Joiners, invite, write_request
from pycomm._bootstrap.protocol import choose

KEY = "0123456789abcdef" * 4


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "group")


@contextlib.contextmanager
def servers(count: int) -> Iterator[tuple[list[Server], list[Any]]]:
    served = [_core.TcpStore.serve("127.0.0.1", 0, KEY) for _ in range(count)]
    yield [Server(0, "127.0.0.1", one.port) for one in served], served
    served.clear()


def test_the_store_of_the_next_rank_is_used_after_the_first_ended() -> None:
    with servers(2) as (addresses, served):
        store = SurvivingStore(addresses, KEY)
        store.set("a", b"1")
        served[1].set("b", b"2")
        served[0] = None
        with pytest.raises(StoreMoved):
            store.get("a", 5.0)
        assert store.get("b", 5.0) == b"2"
        assert store.claim("c", b"3") == b"3"
        assert store.add("n", 4) == 4
        assert store.remove("c") == b"3"
        assert served[1].get("n", 0.0) == b"4"
        assert store.server == addresses[1]
        served[1] = None
        with pytest.raises(StoreMoved):
            store.add("n", 1)
        with pytest.raises(errors.PeerLost, match="can be reached"):
            store.add("n", 1)


def test_a_value_is_claimed_in_the_store_of_the_next_rank() -> None:
    with servers(3) as (addresses, served):
        store = SurvivingStore(addresses, KEY)
        assert store.claim_in_next("a", b"1") == b"1"
        assert store.claim_in_next("a", b"2") == b"1"
        assert served[1].get("a", 0.0) == b"1"
        served[1] = None
        assert store.claim_in_next("a", b"2") == b"2"
        assert served[2].get("a", 0.0) == b"2"
        served[2] = None
        assert store.claim_in_next("a", b"3") == b"3"


def test_a_decision_is_repeated_in_the_store_of_the_next_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For ranks that had not read it when the rank that served the store ended."""
    core: Any = SimpleNamespace(
        name="world", rank=0, size=2, ranks=[0, 1], members=[], lost=lambda: [1], abort=str
    )
    with servers(2) as (addresses, served):

        def regroup(_: Any, __: Any, name: str, *given: Any) -> Any:
            if name == "world~2":
                return core
            served[0] = None
            raise errors.PeerLost("a rank was lost")

        monkeypatch.setattr(shrink, "_core", SimpleNamespace(regroup=regroup))
        monkeypatch.setattr(
            shrink, "processes_of", lambda _: contextlib.nullcontext([None, -1])
        )  # rank 1's process ended
        store: Any = SurvivingStore(addresses, KEY)
        assert shrink.regroup(core, store, 60.0) == (core, None)
        assert served[1].get("world/shrink/decided", 0.0) == b"0"
        assert served[1].get("world~1/shrink/decided", 0.0) == b"0"


def test_ranks_of_earlier_generations_serve_first() -> None:
    with servers(3) as (addresses, served):
        generations = [2, 0, 1]
        given = [Server(g, s.host, s.port) for g, s in zip(generations, addresses, strict=True)]
        SurvivingStore(given, KEY).set("a", b"1")
        assert served[1].get("a", 0.0) == b"1"


def test_requests_are_chosen_once_in_order_and_of_living_processes(file: str) -> None:
    served, server = _core.LocalStore(), Server(0, "127.0.0.1", 5000)
    store: Any = SimpleNamespace(
        server=server, add=served.add, set=served.set, get=served.get, claim=served.claim
    )
    own = _core.TcpStore.serve("127.0.0.1", 0, KEY)
    elastic = Elastic(file, KEY, [server] * 4, own, {})

    def ask(rank: int, pid: int = os.getpid(), *, only: bool = True) -> int:
        return write_request(store, rank, server, pid, 1.0, only)

    def chosen(here: set[int], grown: int = 0, wait_s: float = 0.0, by: str = "") -> Any:
        slots = range(4, 4 + grown) if grown else set(range(4)) - here
        joiners = Joiners(time.monotonic() + wait_s, elastic.answered, by)
        free = {slot: ranks[slot] for slot in slots}
        return choose(joiners.asked(store, 1.0), frozenset(here), free)

    ranks = list(range(6))

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        dead = ask(-1, child.pid)
        assert chosen({0, 1, 3}) == {2: dead}
        child.communicate(b"\n")
    assert chosen({0, 1, 3}) == {}
    assert chosen({0, 1, 3}, wait_s=5.0) is None, "waits"
    store.add("elastic/arrived/0", 1)
    store.set("elastic/request/2", b"[]")  # invalid
    store.add("elastic/arrived/0", 1)  # request 3 has yet to be written
    any_rank, third = ask(-1), ask(3)
    assert chosen({0, 1, 3}) == {2: any_rank}, "only rank 3 suits the other one"
    assert chosen({0}) == {1: any_rank, 3: third}
    assert chosen({0, 1, 2, 3}, 1) == {4: any_rank}
    assert chosen({0, 1}, wait_s=5.0) == {2: any_rank, 3: third}
    preferring = ask(1, only=False)
    assert chosen({0}) == {1: preferring, 2: any_rank, 3: third}
    assert chosen({0, 1}, 2) == {4: any_rank, 5: preferring}, "any other rank, too"
    ranks = [0, 3, 5, 6, 7, 8]  # after ranks were lost
    assert chosen({0}) == {1: third, 2: any_rank, 3: preferring}
    ranks = list(range(6))
    store.add(f"elastic/answered/{preferring}", 1)
    Path(f"{file}.processes").write_text("3")
    assert chosen({0, 1}, wait_s=5.0, by=file) == {2: any_rank, 3: third}
    assert chosen({0, 1, 3}, wait_s=5.0, by=file) == {2: any_rank}
    after = invite(store, elastic, "world~1", [0, 1, 2, 3], [0, 1, 2, 3], {2: any_rank}, 1.0)
    assert [one.generation for one in after.servers] == [0, 0, 1, 0]
    assert after.joined == (2,)
    assert chosen({0}) == {3: third}, "a request is answered once"
    assert chosen({0}, wait_s=5.0) is None, "waits"
    Path(f"{file}.processes").write_text("2")
    assert chosen({0}, wait_s=5.0, by=file) == {3: third}, "no other process can start"
    with pytest.raises(errors.PeerLost, match="asked another store"):
        invite(store, elastic, "world~1", [0, 1], [0, 1], {1: 99}, 1.0)


def test_a_rank_finds_who_continued_without_it(file: str) -> None:
    """Also a rank of a group that processes joined, of which none is left."""
    with servers(5) as (addresses, served):
        first = Elastic(file, KEY, addresses[:3], served[0], {})
        grown = first.after(range(4), {3: addresses[3]})
        assert (first.generation, grown.generation) == (0, 1)
        elastic_store.write_file(file, first.servers)
        assert [elastic_store.successors(grown, rank) for rank in range(4)] == [None] * 4, (
            "the file is older"
        )
        shrunk = grown.after([1, 2], {})
        elastic_store.write_file(file, shrunk.servers)
        assert elastic_store.successors(grown, 0) == elastic_store.successors(grown, 3) == {1, 2}
        assert elastic_store.successors(grown, 1) is elastic_store.successors(grown, 2) is None
        elastic_store.write_file(
            file, shrunk.after([0, 1], {0: addresses[4]}).after([0], {}).servers
        )
        assert elastic_store.successors(grown, 0) == set(), "a process that joined continued alone"
        elastic_store.write_file(file, grown.after([3], {}).servers)
        assert elastic_store.successors(shrunk, 0) == set(), "two groups follow one"


def test_requests_with_an_answer_are_read_once() -> None:
    """Also by the groups that replace the first; another server's requests have own numbers."""
    with servers(2) as (addresses, served):
        store = SurvivingStore(addresses, KEY)
        elastic = Elastic("", KEY, addresses, served[1], {})
        calls: list[Any] = []
        call = store._call

        def count(limit_s: float, *given: Any) -> Any:
            calls.append(given)
            return call(limit_s, *given)

        store._call = count  # type: ignore[method-assign]  # of this store

        def chosen() -> Any:
            calls.clear()
            joiners = Joiners(0.0, elastic.answered)
            return choose(joiners.asked(store, 1.0), frozenset({0}), {1: 1}), len(calls)

        first = write_request(store, 1, addresses[1], os.getpid(), 1.0)
        assert chosen()[0] == {1: first}
        elastic = invite(store, elastic, "world~1", [0, 1], [0, 1], {1: first}, 1.0)
        assert chosen() == ({}, 1), "the number of requests"
        served.pop(0)
        with pytest.raises(StoreMoved):
            chosen()
        again = write_request(store, 1, addresses[1], os.getpid(), 1.0)
        assert again == first
        assert chosen()[0] == {1: again}


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{}", b"[1]", b"[[0, 1, 2]]", b'[["0", "a", 1]]', b'[[0, "a", 0]]', b"\xff"),
        *(b'[[0, "a b", 1]]', b'[[0, "", 1]]', b'[[0, "a", 65536]]', b"[" * 100_000),
        *(b'[[0, "a", 1, 2]]', b'[[true, "a", 1]]'),
    ],
)
def test_an_invalid_file_is_refused(file: str, text: bytes) -> None:
    Path(file).write_bytes(text)
    with pytest.raises(errors.InvalidArgument, match="no file of an elastic group"):
        elastic_store.read_file(file)


def test_the_file_is_private_and_complete(file: str) -> None:
    given = [Server(3, "127.0.0.1", 5000), Server(0, "fe80::1%eth0", 1)]
    elastic_store.write_file(file, given)
    assert elastic_store.read_file(file) == given
    assert os.stat(file).st_mode & 0o777 == 0o600
    assert os.listdir(os.path.dirname(file)) == [os.path.basename(file)]
    with pytest.raises(errors.InvalidArgument, match="cannot write"):
        elastic_store.write_file(f"{file}/below", given)


def test_the_file_is_written_only_if_it_changes(file: str) -> None:
    """All ranks of a group write the same addresses."""
    one, two = [Server(0, "127.0.0.1", 5000)], [Server(1, "127.0.0.1", 5001)]
    elastic_store.write_file(file, one)
    written = os.stat(file)
    elastic_store.write_file(file, one)
    assert os.stat(file) == written
    elastic_store.write_file(file, two)
    assert elastic_store.read_file(file) == two
    Path(file).write_text("[")
    elastic_store.write_file(file, two)
    assert elastic_store.read_file(file) == two


def test_a_group_that_is_not_elastic_says_so() -> None:
    group = pycomm.init()
    try:
        for call in (group.grow, group.replace):
            with pytest.raises(errors.InvalidArgument, match=r"pass elastic=FILE to pycomm.init"):
                call()
        with pytest.raises(errors.InvalidArgument, match="has a default group"):
            pycomm.join("/nowhere")
    finally:
        pycomm.shutdown()


def test_an_elastic_group_needs_a_secret(file: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="needs a secret"):
        pycomm.init(elastic=file)
    with pytest.raises(errors.InvalidArgument, match="needs a secret"):
        pycomm.join(file)


def test_join_ends_at_its_limit(file: str) -> None:
    """Without a file; with a file whose ranks do not live; with ranks that do not call grow()."""
    start = time.monotonic()
    with pytest.raises(errors.Timeout, match="no elastic group wrote"):
        pycomm.join(file, secret=KEY, timeout_s=0.2)
    with servers(1) as (addresses, served):
        elastic_store.write_file(file, addresses)
        with pytest.raises(errors.Timeout, match="did not call grow"):
            pycomm.join(file, secret=KEY, timeout_s=0.2)
        served.clear()
    with pytest.raises(errors.PeerLost, match="can be reached"):
        pycomm.join(file, secret=KEY, timeout_s=30.0)
    assert time.monotonic() - start < 15.0
