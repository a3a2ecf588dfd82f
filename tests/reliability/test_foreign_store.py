"""Values of another program in torch's store cause errors of pycomm, and decide nothing."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import errors
from pycomm._bootstrap.rendezvous import TorchStore
from pycomm.launch import failure, rank
from pycomm.testing.threads import join

dist = pytest.importorskip("torch.distributed")
KEY = "0123456789abcdef"
MINE = failure.Failure(0, "here", 7, "KeyError", "'x'", "the trace", 1.5)


@pytest.mark.parametrize(
    "text", [b"x y", b"0 1 99", b"", b"-1", b"0 0", b"1 0", b"0  1", b"\xff", b"9" * 5000]
)
def test_invalid_decision_ends_shrink_with_an_error(text: bytes) -> None:
    store = TorchStore(dist.HashStore())
    group = join(store, 0, {"size": 1, "timeout_s": 10.0, "transport": "tcp", "secret": KEY})
    store.set("world/shrink/decided", text)
    with pytest.raises(errors.GroupBroken, match="expected ascending ranks below 1"):
        group.shrink(timeout_s=5.0)
    group.close()


FOREIGN = [
    "no json",
    "[" * 100_000,
    "null",
    "[]",
    "{}",
    json.dumps({**asdict(MINE), "color": 1}),  # of a later version
    json.dumps({**asdict(MINE), "rank": "0"}),
    json.dumps({name: value for name, value in asdict(MINE).items() if name != "pid"}),
]


def served(content: str) -> Any:
    """A torch store that contains this as the first failure."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    store.set(failure.KEY, content)
    return store


@pytest.mark.parametrize("content", FOREIGN)
def test_foreign_first_failure_is_ignored(content: str) -> None:
    store = served(content)
    assert failure.post(MINE, "127.0.0.1", store.port) is None


def test_first_failure_is_reported() -> None:
    first = failure.Failure(1, "there", 8, "OSError", "disk", "", 1.0)
    store = served(json.dumps(asdict(first)))
    assert failure.post(MINE, "127.0.0.1", store.port) == first


@pytest.mark.parametrize("content", FOREIGN[:1] + FOREIGN[5:6])
def test_rank_stores_its_failure_whatever_the_store_contains(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = served(content)
    file = tmp_path / "error.json"
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_ERROR_FILE": str(file)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert "the user's" in rank._failed(ValueError("the user's"))
    (left,) = failure.read(json.loads(file.read_text()))
    assert (left.kind, left.text) == ("ValueError", "the user's")


def test_rank_aborts_and_stores_its_failure_before_it_reads_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "x")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(failure, "write", lambda *_: done.append("write"))
    monkeypatch.setattr(failure, "post", lambda *_: done.append("post"))

    class Default:
        def abort(self, reason: str) -> None:
            done.append("abort")

    monkeypatch.setattr(rank.default_group, "default", Default)
    rank._failed(ValueError("x"))
    assert done == ["write", "abort", "post"]


def test_values_of_a_run_with_a_secret_are_signed() -> None:
    raw = dist.HashStore()
    ours, same, other = TorchStore(raw, KEY), TorchStore(raw, KEY), TorchStore(raw, "other" * 4)
    ours.set("a", b"1")
    assert (same.get("a", 1.0), same.add("a", 2)) == (b"1", 3)
    with pytest.raises(errors.Timeout, match="lacks the run's signature"):
        other.get("a", 0.0)
    raw.set("b", raw.get("a"))  # a value is valid under its own key only
    with pytest.raises(errors.Timeout, match="lacks the run's signature"):
        ours.get("b", 0.0)
    for forged in (b"7", b"", bytes(40), raw.get("a")[:-1] + b"9"):
        raw.set("c", forged)
        assert ours.remove("c") is None
        assert ours.claim("c", b"mine") == b"mine"
        assert same.claim("c", b"yours") == b"mine"
        raw.set("c", forged)
        assert (ours.add("c", 5), same.add("c", -7)) == (5, -2)


def test_additions_of_many_threads_all_count() -> None:
    raw = dist.HashStore()
    stores = [TorchStore(raw, KEY) for _ in range(4)]

    def add(store: TorchStore) -> list[int]:
        return [store.add("n", 1) for _ in range(25)]

    with ThreadPoolExecutor(4) as pool:
        sums = [total for each in pool.map(add, stores) for total in each]
    assert sorted(sums) == list(range(1, 101))


def test_invalid_number_is_rejected() -> None:
    raw = dist.HashStore()
    raw.set("n", "abc")
    with pytest.raises(errors.InvalidArgument, match=r"is no number|is not a number"):
        TorchStore(raw).add("n", 1)


def test_process_without_the_secret_does_not_decide_the_shrunk_group() -> None:
    """Forged votes and a forged decision, in place of each of pycomm's."""
    raw = dist.HashStore()
    ready = threading.Barrier(2)

    def forge() -> None:
        shrink = "world/shrink/"
        raw.set(shrink + "decided", "1")
        for kind in ("dead", "lost"):
            raw.set(f"{shrink}{kind}/0", "1")
        for word in ("came", "dead", "lost"):
            raw.set(f"{shrink}{word}/0", "1")

    def one(rank: int) -> tuple[list[int], float]:
        options = {"size": 2, "timeout_s": 20.0, "transport": "shm", "secret": KEY}
        group = join(TorchStore(raw, KEY), rank, options)
        if ready.wait() == 0:
            forge()
        ready.wait()
        smaller = group.shrink()
        outcome = smaller.ranks, float(pycomm.all_reduce(np.ones(1), group=smaller)[0])
        smaller.close()
        group.close()
        return outcome

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [([0, 1], 2.0)] * 2
