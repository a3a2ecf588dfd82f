"""The fault matrix (benchmarks/faults.py): all of it that threads can play, some with processes.

`make faults` runs all of it.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import faults, rank_failure
from benchmarks.fault_rank import Seen
from benchmarks.faults import (
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

TRANSPORTS = ["shm", "tcp"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("action", [action for action in MOMENTS if action not in PROCESSES])
def test_promises_are_kept_among_threads(action: str, transport: str) -> None:
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
def test_promises_are_kept_among_processes(cell: Cell) -> None:
    found = outcome(cell)
    assert found.broken == ""
    assert found.seen[2] is None
    assert all(found.seen[:2])


def test_who_has_just_been_met_hears_why_a_group_does_not_form() -> None:
    """In one of five runs a rank stood already whose last step to another was on its way."""
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
def test_a_broken_promise_is_seen(cell: Cell, seen: Seen, complaint: str) -> None:
    found = faults._broken(cell, [NAMED if cell is LOST else seen, seen, None])
    assert (complaint in found) if complaint else found == ""


def at(action: str, moment: str, verb: str, size: str = "tiny", ranks: int = 3) -> Cell:
    return Cell(action, moment, verb, size, "tcp", ranks)


LEFT_OUT = [
    (at("stop", "middle", "all_reduce"), "often the awaited data was already sent"),
    (at("stop", "closing", "all_reduce"), "a leaving rank does not wait"),
    (at("exit", "start", "all_reduce"), "for the others it equals a kill"),
    (at("exception", "meanwhile", "all_reduce"), "a program raises between calls"),
    (at("disconnect", "idle", "all_reduce"), "the transport acts on transferred bytes"),
    (at("throttle", "idle", "all_reduce"), "the fault lasts for the whole run"),
    (at("skip", "start", "all_reduce"), "the call differs from its start"),
    (at("kill", "forming", "broadcast"), "no call is in progress"),
    (at("wrong op", "idle", "broadcast"), "it reduces nothing"),
    (at("wrong root", "idle", "all_gather"), "it has no root"),
    (at("wrong root", "idle", "broadcast", ranks=2), "both ranks wait for each other"),
    (at("wrong count", "idle", "all_gather_v"), "its counts may differ"),
    (at("kill", "idle", "barrier", "large"), "it carries no data"),
    (at("wrong dtype", "idle", "barrier"), "it carries no data"),
    (at("skip", "idle", "barrier"), "the barrier replaces a call"),
    (at("kill", "start", "barrier"), "the fault would hit"),
]
RUN = [
    *(at("kill", "forming", "all_reduce"), at("kill", "idle", "barrier")),
    *(at("wrong op", "idle", "reduce"), at("wrong operation", "idle", "barrier")),
    *(at("wrong root", "idle", "broadcast"), at("wrong count", "idle", "all_gather")),
]


def test_each_cell_that_is_left_out_has_its_reason_and_no_other_is() -> None:
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
    rows = json.loads(path.read_text())["rows"]
    assert [row["cell"]["verb"] for row in rows] == ["reduce", "broadcast", "gather", "scatter"]
    left_out = json.loads(path.read_text())["left_out"]
    assert sum(gap["cells"] for gap in left_out) + len(rows) == len(MOMENTS["kill"]) * len(VERBS)
    assert all(gap["why"] for gap in left_out)
    assert (tmp_path / "faults.png").stat().st_size > 0
    assert {seen["error"] for row in rows for seen in row["seen"]} == {"Mismatch"}
    shown = capsys.readouterr().out
    # Again, what is broken there alone: the rest stays as it was said to be.
    rows[2]["broken"], rows[3]["seconds"] = "by hand", 1234.0
    path.write_text(json.dumps({"rows": rows}))
    assert faults.main([*chosen, "--json", str(path), "--again"]) == 0
    again = json.loads(path.read_text())["rows"]
    assert (again[2]["broken"], again[2]["before"]) == ("", "by hand")
    assert again[3]["seconds"] == 1234.0
    assert "wrong root" in shown
    assert "Mismatch 12" in shown


def test_the_command_refuses_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        faults.main(["--actions", "explode"])
    assert "no 'explode': --actions takes some of kill, stop" in capsys.readouterr().err
    for wrong in ("peers", "moments"):
        with pytest.raises(SystemExit):
            rank_failure.main([f"--{wrong}", "explode"])
        assert f"no 'explode': --{wrong} takes some of " in capsys.readouterr().err


@pytest.mark.timeout(300)  # twelve processes import torch
def test_survivors_of_a_torch_job_know_who_died(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank_failure.json"
    chosen = ["--ranks", "3", "--peers", "pycomm-tcp", "--rounds", "1", "--json", str(path)]
    chosen += ["--plot", str(tmp_path / "rank_failure.png")]
    assert rank_failure.main(chosen) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["moment"] for row in rows] == [
        name for name in rank_failure.MOMENTS for _ in range(2)
    ]
    assert all(row["named"] and 0 <= row["noticed_ms"] < row["works_ms"] for row in rows)
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
        ("gloo", False, -1.0, 0),  # its promises are not ours
    ],
)
def test_a_survivor_that_is_told_nothing_is_seen(
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
