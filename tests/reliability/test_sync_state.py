"""pycomm.elastic.sync_state: the state of the most advanced ranks on all ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks

import pycomm
from pycomm import Group, elastic, errors
from pycomm.testing import run_ranks

RANKS = 5
MESSAGES = {"all new": "read a checkpoint", "sharded": "the state of rank 1: got a DTensor"}


def state_of(seed: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    return {
        "model": {"w": torch.randn(300, 7, generator=made), "b": torch.tensor(float(seed))},
        "half": [torch.randn(11, generator=made).to(torch.bfloat16), torch.tensor([True, False])],
        "empty": (torch.empty(0, 3), [], {}),
        "strided": torch.arange(40).reshape(5, 8).t()[::2],
        3: {"lr": 0.1, "name": "adam", "none": None, "bytes": b"\0\1", "big": 1 << 60},
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def sync(group: Group, steps: list[int | None], block_bytes: int) -> Any:
    """`steps`: by rank: completed steps; None: the rank is new."""
    elastic.state.BLOCK_BYTES = block_bytes
    group.joined = [rank for rank, step in enumerate(steps) if step is None]
    mine = steps[group.rank]
    given = object() if mine is None else state_of(mine)
    before = group.stats().bytes_sent
    state, step = elastic.sync_state(given, mine or 0, group=group)
    sent = group.stats().bytes_sent - before
    most = max(one for one in steps if one is not None)
    assert step == most
    assert equal(state, state_of(most))
    assert (state is given) == (mine == most)
    return sent


@pytest.mark.parametrize("block_bytes", [1000, 16 << 20])
@pytest.mark.parametrize(
    "steps", [[7, None, 7, 7, 7], [None, 7, 6, 7, None], [None, None, None, None, 7], [7] * 5]
)
def test_all_ranks_get_the_most_advanced_state(steps: list[int | None], block_bytes: int) -> None:
    run_ranks(RANKS, sync, steps, block_bytes)


def send_large(group: Group) -> int:
    group.joined = [1]
    state = {"w": torch.zeros(1 << 20)}
    before = group.stats().bytes_sent
    elastic.sync_state(state, 1, group=group)
    return group.stats().bytes_sent - before


def test_all_ranks_with_the_state_send_a_share() -> None:
    sent = run_ranks(RANKS, send_large, transport="tcp", processes=True)
    share = (4 << 20) / (RANKS - 1)
    for rank, count in enumerate(sent):
        assert count == pytest.approx(0 if rank == 1 else share, abs=0.1 * share), sent


def send_other_bytes(group: Group, block_bytes: int) -> None:
    """Rank 1 sends bytes that differ from those of its digest."""
    elastic.state.BLOCK_BYTES = block_bytes
    group.joined = [2]
    if group.rank == 1:
        read = elastic.state._Content.read
        elastic.state._Content.read = (  # type: ignore[method-assign]  # of this process
            lambda content, begin, end: read(content, begin, end) ^ 1
        )
    with pytest.raises(errors.Error, match="whose SHA-256 differs"):
        elastic.sync_state(state_of(3), 3, group=group)
    pycomm.barrier(group=group)  # the group stays usable


@pytest.mark.parametrize("block_bytes", [1000, 16 << 20])
def test_a_different_copy_is_refused_on_all_ranks(block_bytes: int) -> None:
    run_ranks(3, send_other_bytes, block_bytes, transport="shm", processes=True)


def test_the_digest_does_not_depend_on_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It depends on each byte and on their number."""
    monkeypatch.setattr(elastic.state, "BLOCK_BYTES", 1000)
    bytes_ = np.arange(2345) % 251

    def digest(content: Any, threads: int = 1) -> bytes:
        tensors = [torch.from_numpy(part.astype(np.uint8)) for part in np.split(content, [5, 990])]
        return elastic.state._Content(tensors).sha256(threads)

    assert digest(bytes_) == digest(bytes_, 3)
    others = [bytes_ + (np.arange(bytes_.size) == at) for at in (0, 999, 1000, 2344)]
    others += [bytes_[:-1], np.append(bytes_, 0), np.empty(0)]
    assert len({digest(one) for one in [bytes_, *others]}) == 1 + len(others)


def differ(group: Group, what: str) -> str:
    group.joined = [0]
    state = state_of(3)
    if group.rank == 2:
        if what == "tensors":
            state["model"]["w"][0, 0] += 1
        elif what == "names, shapes or values":
            state[3]["lr"] = 0.2
    with pytest.raises(errors.Mismatch, match=rf"the {what} of ranks \[2\] differ") as raised:
        elastic.sync_state(state, 3, group=group)
    pycomm.barrier(group=group)  # the group stays usable
    return str(raised.value)


@pytest.mark.parametrize("what", ["tensors", "names, shapes or values"])
def test_different_states_are_named_on_all_ranks(what: str) -> None:
    texts = run_ranks(4, differ, what)
    assert len(set(texts)) == 1


@on_ranks(4)
def test_a_copy_of_a_shard_is_found_in_a_subgroup(group: Group) -> None:
    """Ranks 0 and 2 have copies of one shard, ranks 1 and 3 of the other; rank 2 is new."""
    group.joined = [2]
    shard = group.split(group.rank % 2)
    assert shard is not None
    assert shard.joined == ([1] if group.rank % 2 == 0 else [])
    mine = {"shard": torch.full((5,), -1 if group.rank == 2 else group.rank % 2)}
    state, step = elastic.sync_state(mine, 0 if group.rank == 2 else 4, group=shard)
    assert (state["shard"].tolist(), step) == ([group.rank % 2] * 5, 4)


@on_ranks(3)
@pytest.mark.parametrize("case", ["all new", "negative", "object", "sparse", "sharded"])
def test_invalid_states_are_refused_on_all_ranks(group: Group, case: str) -> None:
    group.joined = list(range(group.size)) if case == "all new" else [0]
    state: Any = {"a": object()} if case == "object" and group.rank == 1 else {}
    if case == "sparse" and group.rank == 1:
        state = {"a": torch.eye(3).to_sparse()}
    if case == "sharded" and group.rank == 1:
        state = {"a": torch.ones(3)}
        state["a"].device_mesh = None  # as a DTensor
    step = -1 if case == "negative" else 0
    with pytest.raises(errors.InvalidArgument, match=MESSAGES.get(case)):
        elastic.sync_state(state, step, group=group)
    assert pycomm.all_reduce(np.ones(1), group=group)[0] == group.size
