"""The soak (benchmarks/reliability/soak.py; `make soak` runs it for an hour), for some seconds;
and that it detects violations.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm
from benchmarks.reliability import leak_check, soak, soak_rank
from benchmarks.reliability.soak import FAULTS, Tally, setting
from pycomm import Group, errors

SEED = 20
LATE_MS = 20_000.0  # the promise is 1,000; this is for a machine with the load of tests
OF_ONE_EACH = [
    next(n for n in range(1000) if setting(SEED, n, "").epoch.fault == fault) for fault in FAULTS
]


@pytest.mark.timeout(600)
def test_epoch_with_each_fault_keeps_the_promises() -> None:
    tally = Tally()
    soak.soak(tally, SEED, OF_ONE_EACH, LATE_MS)
    assert tally.complaints == []
    disagreements = {f"wrong {what}" for what in ("operation", "count", "dtype", "op", "root")}
    slow = {"delay", "throttle"}
    timed = {"kill", "stop", "exception", "abort", "disconnect", "corrupt"}
    assert set(tally.faults) == {"nothing", "skip"} | timed | slow | disagreements
    assert tally.epochs == len(tally.faults)
    assert set(soak_rank.VERBS) <= set(tally.calls)
    assert {fault for fault, ms in tally.worst_ms.items() if ms > 0} == timed


def first(fault: str, transport: str) -> int:
    """The first epoch of threads with these."""

    def fits(number: int) -> bool:
        where = setting(SEED, number, "")
        found = where.epoch.fault, where.transport, where.processes
        return found == (fault, transport, False)

    return next(number for number in range(10_000) if fits(number))


def complaints(number: int) -> str:
    tally = Tally()
    soak.soak(tally, SEED, [number], LATE_MS)
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
    right = soak.play

    def leaky(where: soak.Setting) -> Any:
        opened.append(os.dup(0))
        return right(where)

    monkeypatch.setattr(soak, "play", leaky)
    monkeypatch.setattr(leak_check, "LEAVE_S", 0.1)
    try:
        assert "left behind: 1 more descriptors: " in complaints(first("", "local"))
    finally:
        os.close(opened[0])


def test_missing_notification_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "abort", lambda self, reason: None)
    seen = complaints(first("abort", "tcp"))
    assert "GroupBroken with its reason was expected, not " in seen


def test_silent_mismatch_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_rank, "DISAGREEMENTS", {"wrong count": lambda call, size: call})
    seen = complaints(first("wrong count", "shm"))
    assert "this rank got no error for 'wrong count'" in seen
    assert "Mismatch was expected, not nothing" in seen


@pytest.mark.parametrize("fault", ["kill", "disconnect", "corrupt"])
def test_late_or_misnamed_failure_is_detected(fault: str) -> None:
    where = setting(SEED, next(n for n in OF_ONE_EACH if _fault(n) == fault), "")
    victim = where.epoch.victim
    others = tuple(r for r in range(where.epoch.ranks) if r != victim)
    text = f"rank {victim} (host a, pid 1) died"

    def judged(seen: soak.Seen, survivors: tuple[int, ...] = others) -> list[str]:
        outcomes: list[Any] = [soak.Report(seen=seen, survivors=survivors) for _ in range(4)]
        outcomes[victim] = errors.PeerLost("gone")
        return soak.judged(where, outcomes[: where.epoch.ranks], 1000.0)

    assert judged(soak.Seen("PeerLost", text, victim, 20.0)) == []
    assert "reported after 1500 ms" in judged(soak.Seen("PeerLost", text, victim, 1500.0))[0]
    assert "is not named" in judged(soak.Seen("PeerLost", text, others[0], 20.0))[0]
    if fault == "kill":  # a transport may have had too few calls to take effect
        assert "expected, not nothing" in judged(soak.Seen())[0]
        assert "it continued with ()" in judged(soak.Seen("PeerLost", text, victim, 20.0), ())[0]


def _fault(number: int) -> str:
    return setting(SEED, number, "").epoch.fault


def test_command_stores_and_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for name in ("one", "two"):
        path = tmp_path / name
        chosen = ["--seed", str(SEED), "--first", str(first("skip", "tcp")), "--epochs", "1"]
        assert soak.main([*chosen, "--late-ms", str(LATE_MS), "--json", str(path)]) == 0
        found.append(json.loads(path.read_text()))
    assert found[0]["calls"] == found[1]["calls"]
    assert found[0]["faults"] == {"skip": 1}
    assert f"seed {SEED}" in capsys.readouterr().out
