"""Encryption between hosts: all verbs give the same results as without it, the network sees no
plaintext, and modified data ends in PeerLost.

tests/native/encrypted_test.cpp tests every byte of a record; here whole groups are tested.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from core_groups import connect
from encrypted_relay import KEY, Records, Relay, two_ranks
from torch_ranks import Run, run_fixture  # noqa: F401 - a fixture

import pycomm
from pycomm import _core, config, default_group, torch_backend
from pycomm.errors import InvalidArgument, Mismatch, PeerLost, Unsupported
from pycomm.launch import command
from pycomm.testing import FaultPlan, run_ranks

HOSTS = ["a", "a", "b", "b"]
COUNT = 100_003  # elements: more than one frame, and odd


def every_verb(group: pycomm.Group) -> list[Any]:
    rank, size = group.rank, group.size
    mine = np.random.default_rng(rank).standard_normal(COUNT).astype(np.float32)
    rows = np.random.default_rng(rank).standard_normal((size, 1001)).astype(np.float64)
    got: list[Any] = [
        pycomm.all_reduce(mine, group=group),
        pycomm.all_gather(mine, group=group),
        pycomm.reduce_scatter(rows, group=group),
        pycomm.broadcast(mine.copy(), 2, group=group),
        pycomm.all_to_all(rows, group=group),
        pycomm.all_reduce(np.float32([rank]), group=group),
    ]
    part = group.split(rank % 2)
    assert part is not None
    assert part.core.encrypted == group.core.encrypted
    got.append(pycomm.all_reduce(mine, group=part))
    pycomm.barrier(group=group)
    return got


def test_encrypted_results_equal_plain_results() -> None:
    plain, encrypted = (
        run_ranks(4, every_verb, transport="", host_names=HOSTS, encrypt=on) for on in (False, True)
    )
    for ours, theirs in zip(plain, encrypted, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def test_processes() -> None:
    results = run_ranks(
        2, sum_of_ones, transport="", host_names=["a", "b"], encrypt=True, processes=True
    )
    assert results == [2 * COUNT, 2 * COUNT]


def sum_of_ones(group: pycomm.Group) -> float:
    return float(pycomm.all_reduce(np.ones(COUNT), group=group).sum())


@pytest.mark.parametrize("action", ["delay", "throttle"])
def test_slow_arrival_changes_nothing(action: str) -> None:
    plan = FaultPlan(rank=1, action=action, seconds=0.001, chunk_bytes=997)
    results = run_ranks(
        2, sum_of_ones, transport="", host_names=["a", "b"], encrypt=True, faults=[plan]
    )
    assert results == [2 * COUNT, 2 * COUNT]


# --- what the network sees and changes --------------------------------------------------------


SECRET_WORD = b"the weights of a model, 0123456789"


def gather_secret(group: pycomm.Group) -> bool:
    values = np.frombuffer(SECRET_WORD * 100, dtype=np.uint8).copy()
    got = pycomm.all_gather(values, group=group)
    return bool((got.reshape(2, -1) == values).all())


def send_secret_on_demand(group: pycomm.Group) -> bool:
    """In a group whose ranks connect when one first sends to the other."""
    values = np.frombuffer(SECRET_WORD * 200, dtype=np.uint8).copy()
    got = np.zeros_like(values)
    if group.rank:
        pycomm.send(values, 0, group=group)
        return True
    pycomm.recv(got, -1, group=group)
    return bool((got == values).all())


@pytest.mark.parametrize(
    ("body", "full_mesh"),
    [(gather_secret, 64), (send_secret_on_demand, 1)],
    ids=["full mesh", "on demand"],
)
@pytest.mark.parametrize("encrypt", [False, True])
def test_network_sees_plaintext_only_without_encryption(
    encrypt: bool, body: Any, full_mesh: int
) -> None:
    relay = Relay(lambda records: records, bare=True)
    assert two_ranks(relay, body, encrypt, full_mesh) == [True, True]
    assert len(relay.seen) > 2 * len(SECRET_WORD) * 100
    assert (SECRET_WORD in relay.seen) is not encrypt


class Attack:
    """Changes record number `at` of those that rank 1 sends."""

    def __init__(self, kind: str, at: int) -> None:
        self.kind, self.at, self.number = kind, at, 0
        self.held: bytes | None = None

    @property
    def struck(self) -> bool:
        """Whether that record was sent."""
        return self.number > self.at

    def __call__(self, records: Records) -> Records:
        (record,) = records
        number, self.number = self.number, self.number + 1
        if self.held is not None:
            held, self.held = self.held, None
            return [record, held]
        if number != self.at:
            return [record]
        if self.kind == "truncate":
            raise EOFError
        if self.kind == "reorder":
            self.held = record
        middle = len(record) // 2
        flipped = record[:middle] + bytes([record[middle] ^ 1]) + record[middle + 1 :]
        return {"flip": [flipped], "replay": [record, record]}.get(self.kind, [])


def many_sums(group: pycomm.Group) -> None:
    for _ in range(50):
        got = pycomm.all_reduce(np.full(COUNT, group.rank + 1, np.float32), group=group)
        assert (got == 3).all(), "a wrong sum"


@pytest.mark.parametrize("at", [1, 12])
@pytest.mark.parametrize("kind", ["flip", "replay", "drop", "reorder", "truncate"])
def test_attack_ends_in_peer_lost(kind: str, at: int) -> None:
    attack = Attack(kind, at)
    results = two_ranks(Relay(attack), many_sums)
    assert attack.struck
    for rank, error in enumerate(results):
        assert isinstance(error, PeerLost), results
        assert error.peer == 1 - rank
        assert f"rank {1 - rank}" in str(error)
    if kind not in ("truncate",):
        assert "altered, replayed, reordered or truncated" in str(results[0])


# --- options ------------------------------------------------------------------------------------


def join(rank: int, store: _core.LocalStore, **options: Any) -> _core.Group:
    return connect(store, rank, 2, **({"host": "ab"[rank]} | options))


def both(options: list[dict[str, Any]]) -> list[BaseException]:
    def one(group: pycomm.Group) -> None:
        join(group.rank, store, **options[group.rank]).close()

    store = _core.LocalStore()
    return run_ranks(2, one, return_exceptions=True)


def test_secret_in_the_store_is_rejected_on_several_hosts() -> None:
    for error in both([{"encrypt": True}] * 2):
        assert isinstance(error, Unsupported)
        assert "PYCOMM_SECRET" in str(error)
    assert both([{"encrypt": True, "host": "a"}] * 2) == [None, None]  # all data stays on the host


def test_ranks_with_different_encryption_options() -> None:
    key = {"secret": "k" * 32}
    for error in both([{**key, "encrypt": True}, key]):
        assert isinstance(error, Mismatch)
        assert "encrypt=True" in str(error)
        assert "encrypt=False" in str(error)


def test_environment() -> None:
    assert config.environment({"PYCOMM_ENCRYPT": "1"}).encrypt
    assert not config.environment({}).encrypt
    with pytest.raises(InvalidArgument, match="invalid PYCOMM_ENCRYPT: got 'yes'"):
        config.environment({"PYCOMM_ENCRYPT": "yes"})


def test_launcher_requires_a_secret_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYCOMM_SECRET", raising=False)
    monkeypatch.setenv("PYCOMM_ENCRYPT", "0")
    several = ["--encrypt", "--nnodes=2", "--rdzv-endpoint=127.0.0.1:1", "--nproc=1", __file__]
    with pytest.raises(InvalidArgument, match="--nnodes 2 needs PYCOMM_SECRET"):
        command.prepared(command.parser().parse_args(several), "")
    assert not config.environment().encrypt
    monkeypatch.setenv("PYCOMM_SECRET", KEY)
    command.prepared(command.parser().parse_args(several), "")
    assert config.environment().encrypt


def _torch_groups(path: str) -> str:
    rank = dist.get_rank()
    dist.destroy_process_group()
    options = torch_backend.Options(encrypt=True)
    dist.init_process_group(
        "pycomm", init_method=f"file://{path}", rank=rank, world_size=2, pg_options=options
    )
    assert default_group.default_has("encrypt")
    other = torch_backend.Options(encrypt=False)
    try:
        dist.new_group(backend="pycomm", pg_options=other if rank == 1 else None)
    except Mismatch as error:
        return str(error)
    return ""


def test_torch_groups_are_encrypted(run: Run, tmp_path: Path) -> None:
    for text in run(2, _torch_groups, str(tmp_path / "again")):
        assert "rank 0 has size=2, reproducible=False, encrypt=True" in text
        assert "rank 1 has size=2, reproducible=False, encrypt=False" in text


def test_unencrypted_default_group_is_not_reused_for_an_encrypted_one(run: Run) -> None:
    assert run(2, _init_again) == ["encrypt=True, but the default group exists"] * 2


def _init_again() -> str:
    assert pycomm.init().size == 2
    try:
        pycomm.init(encrypt=True)
    except InvalidArgument as error:
        return str(error).partition(" and")[0]
    return ""
