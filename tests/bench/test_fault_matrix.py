"""The fault matrix (benchmarks/reliability/faults.py): all cells that run among threads, some with
processes. `make faults` runs all of it. And the command rank_failure.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability import faults, rank_failure
from benchmarks.reliability.fault_rank import Seen
from benchmarks.reliability.faults import MOMENTS, PROCESSES, TRANSPORTS, Cell, matrix, outcome
from pycomm.bench.support import summaries


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("action", [action for action in MOMENTS if action not in PROCESSES])
def test_promises_hold_among_threads(action: str, transport: str) -> None:
    cells = [cell for cell in matrix([action], [transport]) if not cell.left_out()]
    assert cells
    broken = [(cell, why) for cell in cells if (why := outcome(cell).broken)]
    assert broken == []


@pytest.mark.parametrize(
    "cell",
    [
        Cell("kill", "idle", "all_to_all", "tiny", "shm", 3),
        Cell("kill", "middle", "all_reduce", "large", "tcp", 3),
        Cell("kill", "meanwhile", "all_reduce", "large", "shm", 3),
        Cell("kill", "meanwhile", "gather", "large", "tcp", 3),
        Cell("kill", "forming", "all_reduce", "tiny", "tcp", 3),
        Cell("kill", "closing", "all_reduce", "tiny", "shm", 3),
        Cell("stop", "start", "reduce_scatter", "tiny", "tcp", 3),
        Cell("stop", "meanwhile", "all_gather", "large", "shm", 3),
        Cell("exit", "idle", "broadcast", "large", "tcp", 3),
        Cell("exception", "idle", "scatter", "tiny", "shm", 3),
    ],
    ids=lambda cell: f"{cell.action}-{cell.moment}-{cell.verb}-{cell.transport}",
)
def test_promises_hold_among_processes(cell: Cell) -> None:
    found = outcome(cell)
    assert found.broken == ""
    assert found.seen[2] is None
    assert all(found.seen[:2])


def test_failure_to_form_is_reported_to_the_last_connected_peer() -> None:
    """In one of five runs a rank was complete while its last message to another was in transit."""
    cell = Cell("disconnect", "forming", "all_reduce", "tiny", "shm", 3)
    assert [broken for seed in range(40) if (broken := outcome(cell, seed).broken)] == []


LOST = Cell("kill", "idle", "all_reduce", "tiny", "tcp", 3)
ODD = Cell("wrong count", "idle", "all_reduce", "tiny", "tcp", 3)
NAMED = Seen("PeerLost", "rank 2 (host a, pid 1) died", 2, 20.0)
DISAGREED = Seen("Mismatch", "rank 2 (host a, pid 1) called", 2)
UNDEFINED = replace(DISAGREED, wrong=1, text="what they write is undefined")


@pytest.mark.parametrize(
    ("cell", "seen", "complaint"),
    [
        (LOST, NAMED, ""),
        (LOST, Seen(), "PeerLost was expected, not nothing"),
        (LOST, replace(NAMED, error="Timeout"), "PeerLost was expected"),
        (LOST, replace(NAMED, peer=1), "rank 2 is not named"),
        (LOST, replace(NAMED, text="somebody died"), "rank 2 is not named"),
        (LOST, replace(NAMED, noticed_ms=1500.0), "reported after 1500 ms"),
        (replace(LOST, action="stop"), replace(NAMED, noticed_ms=1500.0), ""),
        (replace(LOST, moment="closing"), NAMED, "nothing was expected"),
        (replace(LOST, action="exception"), NAMED, "GroupBroken was expected"),
        (replace(LOST, action="delay"), Seen(wrong=3), "3 elements are not"),
        (ODD, DISAGREED, ""),
        (ODD, NAMED, "Mismatch was expected"),
        (ODD, replace(DISAGREED, wrong=1), "1 elements are not"),
        (ODD, UNDEFINED, "1 elements"),
        (replace(ODD, verb="gather"), UNDEFINED, ""),
        (ODD, replace(DISAGREED, usable=False), "no longer usable"),
    ],
)
def test_broken_promise_is_detected(cell: Cell, seen: Seen, complaint: str) -> None:
    found = faults._broken(cell, [NAMED if cell is LOST else seen, seen, seen])
    assert (complaint in found) if complaint else found == ""


def test_the_command_runs_and_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "faults.json"
    chosen = ["--actions", "wrong root", "--sizes", "tiny", "--transports", "tcp"]
    assert faults.main([*chosen, "--json", str(path)]) == 0
    stored = summaries.read(path)
    (row,) = stored["rows"]
    assert (row["action"], row["transport"], row["violations"]) == ("wrong root", "tcp", 0)
    assert row["cells"] == len(faults.ONE_WAY)
    assert row["noticed_ms"]["count"] == 3 * row["cells"]
    assert stored["violations"] == []
    every = len(list(matrix(["wrong root"], ["tcp"], ["tiny"])))
    assert sum(gap["cells"] for gap in stored["left_out"]) + row["cells"] == every
    assert "wrong root" in capsys.readouterr().out
    for command, option in ((faults, "actions"), (rank_failure, "peers")):
        with pytest.raises(SystemExit):
            command.main([f"--{option}", "explode"])
        assert "got 'explode', expected some of " in capsys.readouterr().err


def test_violation_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = [Seen("PeerLost", "", 2), Seen(), None]
    monkeypatch.setattr(faults, "outcome", lambda cell, _: faults.Outcome(cell, "a lie", seen))
    chosen = ["--actions", "skip", "--sizes", "tiny", "--transports", "shm"]
    assert faults.main(chosen) == 1
    assert "a lie" in capsys.readouterr().out


@pytest.mark.timeout(300)  # twelve processes import torch
def test_survivors_of_a_torch_job_name_the_dead_rank(tmp_path: Path) -> None:
    path = tmp_path / "rank_failure.json"
    chosen = ["--ranks", "3", "--peers", "pycomm-tcp", "--rounds", "1", "--json", str(path)]
    assert rank_failure.main(chosen) == 0
    rows = summaries.read(path)["rows"]
    assert [row["moment"] for row in rows] == list(rank_failure.MOMENTS)
    for row in rows:
        noticed, works = row["noticed_ms"], row["works_ms"]
        assert row["named"] == row["survivors"] == noticed["count"] == works["count"] == 2
        assert 0 <= noticed["median"] < works["median"], row
        assert ("all_reduce" in row["text"]) == (row["moment"] != "group_creation"), row


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
    def survivors(job: rank_failure.Job) -> list[dict[str, Any]]:
        kind = {"backend": job.backend, "moment": job.moment, "ranks": job.ranks}
        return [{**kind, "noticed_ms": 20.0, "works_ms": works_ms, "text": text}]

    monkeypatch.setattr(rank_failure, "survivors", survivors)
    assert rank_failure.main(["--ranks", "2", "--peers", backend, "--rounds", "1"]) == status
