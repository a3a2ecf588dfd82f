"""The fault matrix (benchmarks/reliability/faults.py): all cells that run among
threads, some with processes.

`make faults` runs all of it.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability import faults, rank_failure
from benchmarks.reliability.fault_rank import Seen
from benchmarks.reliability.faults import (
    COUNTS,
    MOMENTS,
    PROCESSES,
    VERBS,
    Cell,
    every,
    left_out,
    matrix,
    outcome,
)
from pycomm.bench.support import summaries

TRANSPORTS = ["shm", "tcp"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("action", [action for action in MOMENTS if action not in PROCESSES])
def test_promises_hold_among_threads(action: str, transport: str) -> None:
    cells = list(matrix([action], [transport], list(COUNTS), [3]))
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
        (ODD, replace(DISAGREED, wrong=1, text="what they write is undefined"), "1 elements"),
        (
            replace(ODD, verb="gather"),
            replace(DISAGREED, wrong=1, text="what they write is undefined"),
            "",
        ),
        (ODD, replace(DISAGREED, usable=False), "no longer usable"),
    ],
)
def test_broken_promise_is_detected(cell: Cell, seen: Seen, complaint: str) -> None:
    found = faults._broken(cell, [NAMED if cell is LOST else seen, seen, None])
    assert (complaint in found) if complaint else found == ""


def cell_of(action: str, moment: str, verb: str, size: str = "tiny", ranks: int = 3) -> Cell:
    return Cell(action, moment, verb, size, "tcp", ranks)


LEFT_OUT = [
    (cell_of("stop", "middle", "all_reduce"), "often the awaited data was already sent"),
    (cell_of("stop", "closing", "all_reduce"), "a leaving rank does not wait"),
    (cell_of("exit", "start", "all_reduce"), "for the others it equals a kill"),
    (cell_of("exception", "meanwhile", "all_reduce"), "a program raises between calls"),
    (cell_of("disconnect", "idle", "all_reduce"), "the transport acts on transferred bytes"),
    (cell_of("throttle", "idle", "all_reduce"), "the fault lasts for the whole run"),
    (cell_of("skip", "start", "all_reduce"), "the call differs from its start"),
    (cell_of("kill", "forming", "broadcast"), "no call is in progress"),
    (cell_of("wrong op", "idle", "broadcast"), "it reduces nothing"),
    (cell_of("wrong root", "idle", "all_gather"), "it has no root"),
    (cell_of("wrong root", "idle", "broadcast", ranks=2), "both ranks wait for each other"),
    (cell_of("wrong count", "idle", "all_gather_v"), "its counts may differ"),
    (cell_of("kill", "idle", "barrier", "large"), "it carries no data"),
    (cell_of("wrong dtype", "idle", "barrier"), "it carries no data"),
    (cell_of("skip", "idle", "barrier"), "the barrier replaces a call"),
    (cell_of("kill", "start", "barrier"), "the fault would hit"),
]
RUN = [
    *(cell_of("kill", "forming", "all_reduce"), cell_of("kill", "idle", "barrier")),
    *(cell_of("wrong op", "idle", "reduce"), cell_of("wrong operation", "idle", "barrier")),
    *(cell_of("wrong root", "idle", "broadcast"), cell_of("wrong count", "idle", "all_gather")),
]


def test_each_skipped_cell_has_a_reason() -> None:
    for one, why in LEFT_OUT:
        assert left_out(one).startswith(why), one
    assert [left_out(one) for one in RUN] == [""] * len(RUN)
    reasons = {left_out(one) for one in every(list(MOMENTS), TRANSPORTS, list(COUNTS), [2, 3])}
    assert reasons - {""} == {left_out(one) for one, _ in LEFT_OUT}


def test_the_command_runs_and_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "faults.json"
    chosen = ["--actions", "wrong root", "--sizes", "tiny", "--transports", "tcp"]
    drawn = ["--plot", str(tmp_path / "faults.png")]
    assert faults.main([*chosen, "--json", str(path), *drawn]) == 0
    rows = summaries.read(path)["rows"]
    (row,) = rows
    assert (row["action"], row["transport"], row["violations"]) == ("wrong root", "tcp", 0)
    assert row["cells"] == len(("reduce", "broadcast", "gather", "scatter"))
    assert row["noticed_ms"]["count"] == 3 * row["cells"]
    assert 0 < row["noticed_ms"]["median"] <= row["noticed_ms"]["worst"]
    left_out = summaries.read(path)["left_out"]
    assert sum(gap["cells"] for gap in left_out) + row["cells"] == len(MOMENTS["kill"]) * len(VERBS)
    assert all(gap["why"] for gap in left_out)
    assert (tmp_path / "faults.png").stat().st_size > 0
    shown = capsys.readouterr().out
    # Again, with one violation: the times stay as stored.
    cell = cell_of("wrong root", "idle", "gather")
    violation = asdict(cell) | {"broken": "by hand", "before": ""}
    changed = summaries.read(path) | {"rows": [row | {"violations": 1}], "violations": [violation]}
    for _ in range(2):  # a cell that was repeated without a violation is not run a third time
        summaries.write(path, changed)
        assert faults.main([*chosen, "--json", str(path), "--again"]) == 0
        changed = summaries.read(path)
        assert changed["rows"] == rows
        (repeated,) = changed["violations"]
        assert (repeated["broken"], repeated["before"]) == ("", "by hand")
    assert "wrong root" in shown
    assert "Mismatch 12" in shown


def test_command_rejects_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        faults.main(["--actions", "explode"])
    assert "no 'explode': --actions takes some of kill, stop" in capsys.readouterr().err
    for wrong in ("peers", "moments"):
        with pytest.raises(SystemExit):
            rank_failure.main([f"--{wrong}", "explode"])
        assert f"no 'explode': --{wrong} takes some of " in capsys.readouterr().err


@pytest.mark.timeout(300)  # twelve processes import torch
def test_survivors_of_a_torch_job_name_the_dead_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank_failure.json"
    chosen = ["--ranks", "3", "--peers", "pycomm-tcp", "--rounds", "1", "--json", str(path)]
    chosen += ["--plot", str(tmp_path / "rank_failure.png")]
    assert rank_failure.main(chosen) == 0
    rows = summaries.read(path)["rows"]
    assert [row["moment"] for row in rows] == list(rank_failure.MOMENTS)
    for row in rows:
        noticed, works = row["noticed_ms"], row["works_ms"]
        assert row["named"] == row["survivors"] == noticed["count"] == works["count"] == 2
        assert 0 <= noticed["median"] < works["median"], row
        assert noticed["worst"] < works["worst"], row
    for row in rows:
        assert ("all_reduce" in row["text"]) == (row["moment"] != "group_creation"), row
    assert "named" in capsys.readouterr().out
    assert (tmp_path / "rank_failure.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("backend", "named", "works_ms", "status"),
    [
        ("pycomm-shm", True, 30.0, 0),
        ("pycomm-shm", False, 30.0, 1),
        ("pycomm-tcp", True, -1.0, 1),
        ("gloo", False, -1.0, 0),  # its promises are not pycomm's
    ],
)
def test_uninformed_survivor_is_detected(
    backend: str, named: bool, works_ms: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(*kind: Any) -> list[rank_failure.RankFailure]:
        return [
            rank_failure.RankFailure(
                *kind[:3], noticed_ms=20.0, works_ms=works_ms, named=named, text=""
            )
        ]

    monkeypatch.setattr(rank_failure, "job", job)
    assert rank_failure.main(["--ranks", "2", "--peers", backend, "--rounds", "1"]) == status
