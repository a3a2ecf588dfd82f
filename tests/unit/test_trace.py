"""Traces: the files that the core writes to PYCOMM_TRACE, and the output of `pycomm trace`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import errors
from pycomm.__main__ import main
from pycomm.observe import flight_recorder, trace
from pycomm.testing import run_ranks

MS = 1_000_000  # nanoseconds
ALL_REDUCE = flight_recorder.TABLES["operation"].index("all_reduce")
DONE = flight_recorder.TABLES["outcome"].index("done")


def many_calls(group: pycomm.Group, n: int) -> None:
    x = np.ones(64, np.float32)
    for _ in range(n):
        pycomm.all_reduce(x, "max", group=group)
    part = group.split(0)
    assert part is not None
    pycomm.broadcast(x, 1, group=part)
    if group.rank == 0:
        pycomm.send(x, 1, group=group)
    else:
        pycomm.recv(x, 0, group=group)


@pytest.mark.parametrize("processes", [False, True])
def test_run_records_every_call_of_every_rank(
    processes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = tmp_path / "made" / "here"
    monkeypatch.setenv("PYCOMM_TRACE", str(folder))
    run_ranks(2, many_calls, 1000, transport="", processes=processes)
    names = ["world-0.0.0.trace", "world-0.0.1.trace", "world.0.trace", "world.1.trace"]
    assert sorted(path.name for path in folder.iterdir()) == names
    for rank in range(2):
        calls = flight_recorder.read(folder / f"world.{rank}.trace").records
        sums = calls[calls["operation"] == ALL_REDUCE]
        assert len(sums) == 1000
        assert np.all(np.diff(sums["sequence"].astype(int)) == 1)
        assert np.all(sums["begun"] <= sums["ended"])
        assert np.all(sums["begun"][1:] >= sums["ended"][:-1])
        assert np.all(sums["waited"] <= sums["ended"] - sums["begun"])
    assert main(["trace", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "others waited" in printed
    assert main(["trace", str(folder), "--json", "--out", str(folder / "second.json")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [one["label"][:6] for one in figures["ranks"]] == ["rank 0", "rank 1"]
    assert all(one["calls"] >= 1000 and one["inside_s"] > 0 for one in figures["ranks"])
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert f"{len(events):,} events" in printed
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name[:6] for name in names] == ["rank 0", "rank 1"]
    for pid in range(2):
        mine = [event for event in events if event["pid"] == pid]
        assert sum(event["name"] == "all_reduce(float32, 64, max)" for event in mine) == 1000
        groups = {e["args"]["name"] for e in mine if e["name"] == "thread_name"}
        assert groups == {"group world", "group world/0.0"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def calls_around_a_mismatch(group: pycomm.Group, before: int, after: int) -> None:
    x = np.ones(4, np.float32)
    for _ in range(before):
        pycomm.all_reduce(x, "max", group=group)
    with pytest.raises(errors.Mismatch):
        pycomm.all_reduce(np.ones(4 + group.rank, np.float32), group=group)
    for _ in range(after):
        pycomm.all_reduce(x, "max", group=group)


def test_a_trace_continues_after_a_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written at once, so later parts begin anywhere in the ring of 256 records."""
    monkeypatch.setenv("PYCOMM_TRACE", str(tmp_path))
    run_ranks(2, calls_around_a_mismatch, 200, 300)
    for rank in range(2):
        calls = flight_recorder.read(tmp_path / f"world.{rank}.trace").records
        sums = calls[calls["operation"] == ALL_REDUCE]
        assert len(sums) == 501
        assert np.flatnonzero(sums["outcome"] != DONE).tolist() == [200]


def trace_of_rank(rank: int, host: str, times: Any, **fields: Any) -> bytes:
    """The trace of a rank of two that made these calls: rows of begin and end, nanoseconds."""
    head = np.zeros(1, flight_recorder.HEAD)
    given = {
        "magic": flight_recorder.MAGIC,
        "id": 1,
        "size": 2,
        "name": "world",
        "begun": len(times),
    }
    for name, value in {**given, "rank": rank, "host": host, "host_id": host, **fields}.items():
        head[name] = value.encode() if isinstance(value, str) else value
    records = np.zeros(len(times), flight_recorder.CALL)
    records["begun"], records["ended"] = np.array(times).T
    records["sequence"], records["outcome"] = np.arange(len(times)), 1
    return head.tobytes().ljust(flight_recorder.HEAD_BYTES, b"\0") + records.tobytes()


def write_traces(folder: Path, *ranks: bytes) -> None:
    for i, data in enumerate(ranks):
        (folder / f"world.{i}.trace").write_bytes(data)


def test_clocks_of_hosts_are_aligned_by_the_ends_of_calls(tmp_path: Path) -> None:
    """Rank 1's clock is 5 s ahead; it begins 3 ms after rank 0, which is late once."""
    begins = np.arange(0, 1000 * MS, 10 * MS)
    first = np.stack([begins, begins + 4 * MS], axis=1)
    second = first + 5_000 * MS + np.array([3 * MS, 0])
    second[7, 0] -= 6 * MS  # here rank 0 was 3 ms late
    write_traces(tmp_path, trace_of_rank(0, "a", first), trace_of_rank(1, "b", second))
    timeline = trace.merge(tmp_path)
    assert abs(timeline.shifts["b"] + 5_000 * MS) <= timeline.uncertainties["b"] < 3 * MS
    assert [rank.last for rank in timeline.ranks] in ([1, 99], [0, 100])
    waits = [event for event in trace.events(timeline) if event.get("cat") == "waits"]
    assert sum(event["name"] == "waits for rank 1" and event["pid"] == 0 for event in waits) >= 99
    assert (
        f"the clock of b is exact to within {timeline.uncertainties['b'] / 1e3:,.0f} us"
        in trace.table(timeline)
    )


def test_last_rank_on_one_host_is_known_to_the_nanosecond(tmp_path: Path) -> None:
    first = [[0, 5 * MS], [10 * MS, 11 * MS]]
    second = [[3 * MS, 6 * MS], [7 * MS, 12 * MS]]
    write_traces(tmp_path, trace_of_rank(0, "a", first), trace_of_rank(1, "a", second, pid=1))
    timeline = trace.merge(tmp_path)
    assert [(rank.last, rank.late) for rank in timeline.ranks] == [(1, 3 * MS), (1, 3 * MS)]
    waits = [event for event in trace.events(timeline) if event.get("cat") == "waits"]
    assert [(e["name"], e["ts"], e["dur"]) for e in waits] == [
        ("waits for rank 1", 0.0, 3000.0),
        ("waits for rank 0", 7000.0, 3000.0),
    ]


def test_files_of_an_earlier_run_are_ignored(tmp_path: Path) -> None:
    ranks = [trace_of_rank(i, "a", [[0, 1]], id=2, wall_ns=9, pid=i) for i in range(2)]
    write_traces(tmp_path, *ranks, trace_of_rank(1, "a", [[0, 1]], pid=7, wall_ns=8))
    assert len(trace.merge(tmp_path).ranks) == 2


def test_missing_and_damaged_traces_are_reported(tmp_path: Path, capsys: Any) -> None:
    for message in ("has no traces", "is not a flight record"):
        assert main(["trace", str(tmp_path)]) == 1
        assert message in capsys.readouterr().err
        (tmp_path / "world.0.trace").write_text("{}")


def test_invalid_folder_is_rejected_with_the_variable_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYCOMM_TRACE", str(tmp_path / "file" / "below"))
    with pytest.raises(errors.InvalidArgument, match=r"invalid PYCOMM_TRACE .*below"):
        run_ranks(1, many_calls, 1)
