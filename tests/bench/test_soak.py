"""The soak (benchmarks/reliability/soak.py; `make soak` runs it for an hour): an epoch with each
fault, and that it detects violations.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm
from benchmarks.reliability import fault_rank, faults, leak_check, soak
from benchmarks.reliability.fault_rank import DISAGREEMENTS, SLOW
from benchmarks.reliability.soak import ACTIONS, Tally, epoch_of
from pycomm import Group
from pycomm.bench.support import summaries

SEED = 20


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The promise is 1,000 ms; this is for a machine with the load of tests."""
    monkeypatch.setattr(faults, "AT_ONCE_MS", 20_000.0)


def first(action: str, transport: str = "") -> int:
    """The first epoch with this fault; with a transport: of threads."""

    def fits(number: int) -> bool:
        job = epoch_of(SEED, number)
        found = not transport or (job.transport, job.processes) == (transport, False)
        return job.action == action and found

    return next(number for number in range(10_000) if fits(number))


@pytest.mark.timeout(600)
def test_epoch_with_each_fault_keeps_the_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    tally, verbs = Tally(), set()
    right = fault_rank.Call.make

    def make(self: fault_rank.Call, *arrays: Any) -> None:
        verbs.add(self.verb)
        right(self, *arrays)

    monkeypatch.setattr(fault_rank.Call, "make", make)
    soak.soak(tally, SEED, map(first, ACTIONS))
    assert tally.complaints == []
    assert set(tally.faults) == {"nothing", *ACTIONS[1:]}
    assert verbs == set(fault_rank.VERBS)
    timed = {*ACTIONS[1:]} - {*SLOW, *DISAGREEMENTS}
    assert {fault for fault, ms in tally.worst_ms.items() if ms > 0} == timed


def complaints(number: int) -> str:
    tally = Tally()
    soak.soak(tally, SEED, [number])
    return "\n".join(tally.complaints)


def test_wrong_sum_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = pycomm.all_reduce

    def wrong(x: Any, op: str = "sum", *, group: Group) -> Any:
        right(x, op, group=group)
        if group.rank == 1:
            x[..., -1] += np.ones((), x.dtype)
        return x

    monkeypatch.setattr(pycomm, "all_reduce", wrong)
    assert "1 elements are wrong after Call(verb='all_reduce'" in complaints(first("", "local"))


def test_leaked_descriptor_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    right = faults.run

    def leaky(job: fault_rank.Job) -> Any:
        opened.append(os.dup(0))
        return right(job)

    monkeypatch.setattr(faults, "run", leaky)
    monkeypatch.setattr(leak_check, "LEAVE_S", 0.1)
    try:
        assert "left behind: 1 more descriptors: " in complaints(first("", "local"))
    finally:
        os.close(opened[0])


def test_missing_error_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "abort", lambda self, reason: None)
    assert "GroupBroken was expected, not nothing" in complaints(first("abort", "tcp"))
    monkeypatch.setitem(DISAGREEMENTS, "wrong count", lambda call, size: call)
    assert "Mismatch was expected, not nothing" in complaints(first("wrong count", "shm"))


def test_command_stores_and_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for name in ("one", "two"):
        path = tmp_path / name
        chosen = ["--seed", str(SEED), "--first", str(first("skip", "tcp")), "--minutes", "0"]
        assert soak.main([*chosen, "--json", str(path)]) == 0
        found.append(summaries.read(path))
    assert found[0]["calls_in_all"] == found[1]["calls_in_all"] > 0
    assert found[0]["faults"] == {"skip": 1}
    assert f"seed {SEED}" in capsys.readouterr().out
