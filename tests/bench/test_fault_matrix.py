"""The fault matrix (benchmarks/reliability/faults.py): all cells that run among threads, some with
processes. `make faults` runs all of it. And the command rank_failure.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability import faults, rank_failure
from benchmarks.reliability.fault_rank import Call, Job, Report
from benchmarks.reliability.faults import LARGE, MOMENTS, PROCESSES, TINY, TRANSPORTS, broken, run
from pycomm.bench.support import summaries


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("action", [action for action in MOMENTS if action not in PROCESSES])
def test_promises_hold_among_threads(action: str, transport: str) -> None:
    cells = list(faults.matrix([action], [transport]))
    assert cells
    assert [(cell, wrong) for cell in cells if (wrong := broken(cell, run(cell)))] == []


@pytest.mark.parametrize(
    ("action", "moment", "verb", "count", "transport"),
    [
        ("kill", "idle", "all_to_all", TINY, "shm"),
        ("kill", "middle", "all_reduce", LARGE, "tcp"),
        ("kill", "meanwhile", "all_reduce", LARGE, "shm"),
        ("kill", "meanwhile", "gather", LARGE, "tcp"),
        ("kill", "forming", "all_reduce", TINY, "tcp"),
        ("kill", "closing", "all_reduce", TINY, "shm"),
        ("stop", "start", "reduce_scatter", TINY, "tcp"),
        ("stop", "meanwhile", "all_gather", LARGE, "shm"),
        ("exit", "idle", "broadcast", LARGE, "tcp"),
        ("exception", "idle", "scatter", TINY, "shm"),
    ],
)
def test_promises_hold_among_processes(
    action: str, moment: str, verb: str, count: int, transport: str
) -> None:
    job = Job(action, moment, Call(verb, count), transport, processes=True)
    assert job in list(faults.matrix())
    assert broken(job, run(job)) == []


def test_failure_to_form_is_reported_to_the_last_connected_peer() -> None:
    """In one of five runs a rank was complete while its last message to another was in transit."""
    job = Job("disconnect", "forming", Call("all_reduce", TINY), "shm", processes=False)
    assert [wrong for _ in range(40) if (wrong := broken(job, run(job)))] == []


LOST = Job("kill", "idle", Call("all_reduce", TINY), "tcp", processes=True)
ODD = replace(LOST, action="wrong count")
ONE_WAY = replace(ODD, call=Call("gather", TINY))
NAMED = Report("PeerLost", "rank 2 (host a, pid 1) died", 2, 20.0)
DISAGREED = Report("Mismatch", "rank 2 (host a, pid 1) called", 2)
UNDEFINED = replace(DISAGREED, wrong=1, text="what they write is undefined")
CONTINUES = replace(LOST, after=1)


@pytest.mark.parametrize(
    ("job", "seen", "complaint"),
    [
        (LOST, NAMED, ""),
        (LOST, Report(), "PeerLost was expected, not nothing"),
        (LOST, replace(NAMED, error="Timeout"), "PeerLost was expected"),
        (LOST, replace(NAMED, peer=1), "rank 2 is not named"),
        (LOST, replace(NAMED, text="somebody died"), "rank 2 is not named"),
        (LOST, replace(NAMED, noticed_ms=1500.0), "reported after 1500 ms"),
        (LOST, replace(NAMED, complaints=["4 elements are"]), "rank 0: 4 elements are"),
        (replace(LOST, action="stop"), replace(NAMED, noticed_ms=1500.0), ""),
        (replace(LOST, moment="closing"), NAMED, "nothing was expected"),
        (replace(LOST, action="exception"), NAMED, "GroupBroken was expected"),
        (replace(LOST, action="delay"), Report(wrong=3), "3 elements are not"),
        (replace(LOST, action="corrupt", moment="any bytes"), Report(), ""),
        (CONTINUES, replace(NAMED, survivors=(0, 1)), ""),
        (CONTINUES, NAMED, "it continued with (), not with (0, 1)"),
        (ODD, DISAGREED, ""),
        (ODD, NAMED, "Mismatch was expected"),
        (ODD, replace(DISAGREED, wrong=1), "1 elements are not"),
        (ODD, UNDEFINED, "1 elements"),
        (ONE_WAY, UNDEFINED, ""),
        (ODD, replace(DISAGREED, usable=False), "no longer usable"),
    ],
)
def test_broken_promise_is_detected(job: Job, seen: Report, complaint: str) -> None:
    found = "; ".join(broken(job, [seen] * 3))
    assert (complaint in found) if complaint else found == ""


def test_the_command_runs_stores_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, chosen = tmp_path / "faults.json", ["--actions", "wrong root", "--transports", "tcp"]
    assert faults.main([*chosen, "--json", str(path)]) == 0
    stored = summaries.read(path)
    (row,) = stored["rows"]
    assert (row["action"], row["transport"], row["violations"]) == ("wrong root", "tcp", 0)
    assert row["noticed_ms"]["count"] == 3 * row["cells"] == 3 * 2 * len(faults.ONE_WAY)
    assert stored["violations"] == []
    monkeypatch.setattr(faults, "run", lambda job: [NAMED] * 3)
    assert faults.main([*chosen, "--json", str(path)]) == 1
    assert len(summaries.read(path)["violations"]) == row["cells"]
    assert "Mismatch was expected, not PeerLost" in capsys.readouterr().out


@pytest.mark.timeout(300)  # three processes import torch
def test_survivors_of_a_torch_job_name_the_dead_rank(tmp_path: Path) -> None:
    path = tmp_path / "rank_failure.json"
    chosen = ["--ranks", "3", "--peers", "pycomm-tcp", "--rounds", "1", "--json", str(path)]
    assert rank_failure.main(chosen) == 0
    (row,) = summaries.read(path)["rows"]
    noticed, works = row["noticed_ms"], row["works_ms"]
    assert row["named"] == row["survivors"] == noticed["count"] == works["count"] == 2
    assert 0 <= noticed["median"] < works["median"]
    assert "all_reduce" in row["text"]


@pytest.mark.parametrize(
    ("backend", "text", "works_ms", "status"),
    [
        ("pycomm-shm", "rank 1 died", 30.0, 0),
        ("pycomm-shm", "somebody died", 30.0, 1),
        ("pycomm-tcp", "rank 1 died", -1.0, 1),
        ("gloo", "somebody died", -1.0, 0),  # its promises are not pycomm's
    ],
)
def test_uninformed_survivor_is_detected(
    backend: str, text: str, works_ms: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {"noticed_ms": 20.0, "works_ms": works_ms, "text": text}
    monkeypatch.setattr(rank_failure, "survivors", lambda *job: [seen])
    assert rank_failure.main(["--ranks", "2", "--peers", backend, "--rounds", "1"]) == status
