"""The soak (benchmarks/reliability/soak.py; `make soak` runs it for an hour): an epoch with each
fault, and that it detects violations.
"""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import pycomm
from benchmarks.reliability import command, leak_check, soak, soak_rank
from benchmarks.reliability.fault_rank import DISAGREEMENTS, Seen
from benchmarks.reliability.soak import FAULTS, Tally, epoch_of
from pycomm import Group, errors

SEED = 20
LATE_MS = 20_000.0  # the promise is 1,000; this is for a machine with the load of tests


def first(fault: str, transport: str = "") -> int:
    """The first epoch with this fault; with a transport: of threads."""

    def fits(number: int) -> bool:
        epoch = epoch_of(SEED, number, "")
        found = not transport or (epoch.transport, epoch.processes) == (transport, False)
        return epoch.job.action == fault and found

    return next(number for number in range(10_000) if fits(number))


@pytest.mark.timeout(600)
def test_epoch_with_each_fault_keeps_the_promises() -> None:
    tally = Tally()
    soak.soak(tally, SEED, map(first, FAULTS), LATE_MS)
    assert tally.complaints == []
    timed = {"kill", "stop", "exception", "abort", "disconnect", "corrupt"}
    assert set(tally.faults) == {"nothing", "delay", "throttle", *timed, *DISAGREEMENTS}
    assert set(soak_rank.VERBS) <= set(tally.calls)
    assert {fault for fault, ms in tally.worst_ms.items() if ms > 0} == timed


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

    def leaky(where: soak.Epoch) -> Any:
        opened.append(os.dup(0))
        return right(where)

    monkeypatch.setattr(soak, "play", leaky)
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


def test_survivors_that_do_not_continue_are_detected() -> None:
    epoch = epoch_of(SEED, first("kill"), "")
    victim = epoch.job.victim
    others = tuple(rank for rank in range(epoch.ranks) if rank != victim)
    seen = Seen("PeerLost", f"rank {victim} (host a, pid 1) died", victim, 20.0)

    def judged(survivors: tuple[int, ...]) -> list[str]:
        outcomes: list[Any] = [soak.Report(seen=seen, survivors=survivors) for _ in others]
        outcomes.insert(victim, errors.PeerLost("gone"))
        return soak.judged(epoch, outcomes, 10.0 + LATE_MS)

    assert judged(others) == []
    assert "it continued with ()" in judged(())[0]


def test_epochs_end_with_the_minutes_and_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    terminal = Console(file=output, force_terminal=True, width=80)
    monkeypatch.setattr(command, "CONSOLE", terminal)
    assert list(command.timed(range(3), 1.0, "epochs")) == [0, 1, 2]
    assert "2 epochs" in output.getvalue()
    assert list(command.timed(range(3), 0.0, "epochs")) == []


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
