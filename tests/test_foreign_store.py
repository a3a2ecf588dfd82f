"""What another program wrote into torch's store ends as errors of pycomm, and decides nothing."""

import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pycomm import errors
from pycomm.launch import failure, rank
from pycomm.rendezvous import TorchStore
from pycomm.testing import _join

dist = pytest.importorskip("torch.distributed")
KEY = "0123456789abcdef"
MINE = failure.Failure(0, "here", 7, "KeyError", "'x'", "the trace", 1.5)


@pytest.mark.parametrize(
    "text", [b"x y", b"0 1 99", b"", b"-1", b"0 0", b"1 0", b"0  1", b"\xff", b"9" * 5000]
)
def test_a_decision_that_is_none_ends_shrink_with_an_error(text: bytes) -> None:
    store = TorchStore(dist.HashStore())
    group = _join(store, 0, {"size": 1, "timeout_s": 10.0, "transport": "tcp", "secret": KEY})
    store.set("world/shrink/decided", text)
    with pytest.raises(errors.GroupBroken, match="no ascending list of ranks below 1"):
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
    """A store of torch's that holds this as the first failure."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    store.set(failure.KEY, content)
    return store


@pytest.mark.parametrize("content", FOREIGN)
def test_a_first_failure_that_is_none_of_ours_is_no_cause(content: str) -> None:
    store = served(content)
    assert failure.post(MINE, "127.0.0.1", store.port) is None


def test_the_first_failure_is_told() -> None:
    first = failure.Failure(1, "there", 8, "OSError", "disk", "", 1.0)
    store = served(json.dumps(asdict(first)))
    assert failure.post(MINE, "127.0.0.1", store.port) == first


@pytest.mark.parametrize("content", FOREIGN[:1] + FOREIGN[5:6])
def test_a_rank_leaves_its_failure_whatever_the_store_holds(
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


def test_a_rank_aborts_and_leaves_its_failure_before_it_asks_the_store(
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

    monkeypatch.setattr(rank.group, "default", Default)
    rank._failed(ValueError("x"))
    assert done == ["write", "abort", "post"]
