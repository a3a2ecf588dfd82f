"""The benchmarks of reliability: each runs and stores, and detects violated guarantees. The
guarantees themselves: tests/reliability/test_fault_matrix.py.
"""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_runs import first_epoch, stored

from benchmarks.reliability import (
    cancellation,
    check_overhead,
    connection_flood,
    elastic,
    faults,
    gloo_failures,
    rank_failure,
    soak,
)
from benchmarks.reliability.check_overhead import Case
from benchmarks.reliability.connection_flood import Flood
from benchmarks.reliability.fault_rank import Call, Job, Report
from benchmarks.reliability.faults import TINY, broken
from benchmarks.support import leak_check

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


def test_faults_run_and_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "faults --actions 'wrong root' --transports tcp"
    content = stored(tmp_path, words)
    (row,) = content["rows"]
    assert (row["action"], row["transport"], row["violations"]) == ("wrong root", "tcp", 0)
    assert row["noticed_ms"]["count"] == 3 * row["cells"] == 3 * 2 * len(faults.ONE_WAY)
    assert content["violations"] == []
    monkeypatch.setattr(faults, "run", lambda job: [NAMED] * 3)
    assert len(stored(tmp_path, words, status=1)["violations"]) == row["cells"]
    assert "Mismatch was expected, not PeerLost" in capsys.readouterr().out


@pytest.mark.timeout(300)  # three processes import torch
def test_rank_failure_runs(tmp_path: Path) -> None:
    (row,) = stored(tmp_path, "rank_failure --ranks 3 --peers pycomm-tcp --rounds 1")["rows"]
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


@pytest.mark.timeout(300)  # three processes import torch
def test_gloo_failures_run_and_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "gloo_failures --failures 'another size' --peers pycomm"
    (row,) = stored(tmp_path, words)["rows"]
    assert row["knew"] == row["named"] == row["ranks"] == 2
    assert "all_reduce" in row["text"]
    monkeypatch.setattr(gloo_failures, "reports", lambda *job: [(0.1, gloo_failures.NO_ERROR)])
    assert stored(tmp_path, words, status=1)["rows"][0]["knew"] == 0


def test_cancellation_runs_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([1.0, 250.0, 3.0, 4.0])
    monkeypatch.setattr(cancellation, "WAITS", dict.fromkeys(["here", "there"]))
    monkeypatch.setattr(cancellation, "took_ms", lambda name: next(took))
    rows = stored(tmp_path, "cancellation --rounds 2", status=1)["rows"]  # one took too long
    assert rows[0] == {"wait": "here", "median_ms": 125.5, "worst_ms": 250.0, "rounds": 2}


# ---- the cost of the checks ----------------------------------------------------------------------


def test_check_overhead_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case("shm", 4, 10), Case("tcp", 4096, 10)]  # without a limit
    monkeypatch.setattr(check_overhead, "CASES", cases)
    costs = stored(tmp_path, "check_overhead --rounds 2")["costs"]
    assert [(c["transport"], c["bytes"]) for c in costs] == [("shm", 4), ("tcp", 4096)]
    assert all(c["with_ns"] > 0 < c["without_ns"] for c in costs)
    # Otherwise both programs would be equal, and the checks would seem to cost nothing.
    path = "shared/shared_memory_region.cpp"
    monkeypatch.setitem(check_overhead.REMOVED, path, [("no such line", "")])
    with pytest.raises(ValueError, match=rf"{path} has 0 times, not once: no such"):
        check_overhead.without_checks(path)


def test_limit_of_the_case_decides_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    shm, tcp = Case("shm", 4, 1, most_ns=30.0), Case("tcp", 4096, 1, most_percent=1.0)
    for case, cost, kept in (shm, 29, True), (shm, 31, False), (tcp, 9, True), (tcp, 11, False):
        # The best batch counts.
        outputs = {"with": f"{1000 + cost}\n2000\n", "without": "3000\n1000\n"}
        monkeypatch.setattr(subprocess, "check_output", lambda c, of=outputs, **_: of[c[0]])
        found = check_overhead.measure({name: name for name in outputs}, case, 3)
        names = ("with_ns", "without_ns", "cost_ns", "spread_ns", "kept")
        assert [found[name] for name in names] == [1000 + cost, 1000, cost, 0, kept]


# ---- connection flood ----------------------------------------------------------------------------

KEPT = Flood("pycomm", 900, 100, 0.1, 0.1, 1000.0, 990.0, 20, 20)


@pytest.mark.no_attack("descriptors of its ranks are counted, and it makes such calls itself")
def test_connection_flood_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_flood, "STEPS", 300)
    monkeypatch.setattr(connection_flood, "JOBS", 2)
    monkeypatch.setattr(connection_flood, "LEAST_KEPT", 0.0)  # the machine is shared
    words = "connection_flood --peers pycomm --connections 1000"
    (flood,) = stored(tmp_path, words)["flood"]
    assert flood["connected"] >= 100, "clients connect while the group forms"
    assert flood["refused"] >= 100, "clients are refused once the store's public port is closed"
    assert min(flood["forming_quiet_s"], flood["forming_s"]) > 0
    assert min(flood["steps_per_s_decoy"], flood["steps_per_s"]) > 0


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (KEPT, True),
        (replace(KEPT, error="PeerLost"), False),
        (replace(KEPT, descriptors=21), False),
        (replace(KEPT, let_in=1), False),
        (replace(KEPT, steps_per_s=899.0), False),
        (replace(KEPT, backend="gloo", error="it hangs"), True),  # its promises are not pycomm's
    ],
)
def test_harmful_flood_is_detected(found: Flood, kept: bool) -> None:
    assert found.kept() == kept


# ---- elastic -------------------------------------------------------------------------------------


@pytest.mark.timeout(300)  # 12 processes import torch
def test_elastic_runs(tmp_path: Path) -> None:
    words = "elastic --ranks 3 --state-mb 1 --rounds 2 --minutes 0.05 --interval 1.5"
    content = stored(tmp_path, f"{words} --starts forked")
    (replaced,) = content["replacements"]
    assert 0 < replaced["join_ms"] <= replaced["join_worst_ms"]
    assert 0 < replaced["idle_ms"] <= replaced["idle_worst_ms"]
    quiet, killed = content["training"]
    assert (quiet["kills"], killed["kills"]) == (0, 2)
    assert killed["bitwise_equal"]
    assert killed["compared"] > 0
    assert killed["idle_s"] > 0 == quiet["idle_s"]


def test_other_parameters_are_detected() -> None:
    run = {"kind": "forked", "seconds": 2.0, "steps": 100, "kills_at": [50]}
    run |= {"waited_s": 0.5, "idle_s": 0.6}
    first = {**run, "marks": {50: {7}, 100: {8}}}
    (_, row), equal = elastic.compared([first, {**run, "steps": 50, "marks": {50: {7}}}])
    assert equal
    assert (row["share"], row["share_without_start"]) == (0.5, pytest.approx(2 / 3))
    for marks in ({50: {7, 9}}, {50: {9}}, {}):
        rows, equal = elastic.compared([first, {**run, "marks": marks}])
        assert not equal
        assert not rows[1]["bitwise_equal"]


# ---- soak ----------------------------------------------------------------------------------------

SEED = 20


def test_soak_runs_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = first_epoch(SEED, "skip", "tcp")
    words = f"soak --seed {SEED} --first {number} --minutes 0"
    one, two = (stored(tmp_path, words) for _ in range(2))
    assert one["calls_in_all"] == two["calls_in_all"] > 0
    assert one["faults"] == {"skip": 1}
    assert f"seed {SEED}" in capsys.readouterr().out


def test_soak_detects_wrong_results_and_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    run = faults.run

    def leaky(job: Job) -> list[Report]:
        opened.append(os.dup(0))
        return run(job)

    monkeypatch.setattr(faults, "run", leaky)
    monkeypatch.setattr(leak_check, "LEAVE_S", 0.1)
    monkeypatch.setattr(Call, "make", lambda *arguments: None)
    tally = soak.Tally()
    soak.soak(tally, SEED, [first_epoch(SEED, "", "local")])
    os.close(opened[0])
    found = "\n".join(tally.complaints)
    assert "elements are wrong after Call(verb='all_reduce'" in found
    assert "left behind: 1 more descriptors: " in found
