"""The flight recorder: written when a group fails, and shown by `pycomm info --flight`."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished import finished
from hypothesis import given
from hypothesis import strategies as st
from properties import SETTINGS
from torch_ranks import Run, run_fixture  # noqa: F401 - a fixture

import pycomm
from pycomm import errors
from pycomm.observe import flight_recorder, flight_report
from pycomm.testing import FaultPlan, run_ranks

X = np.ones(1000, np.float32)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The prefix of files of the flight recorder, for ranks that are started here."""
    monkeypatch.setenv("PYCOMM_FLIGHT_RECORD", str(tmp_path / "calls"))
    return tmp_path / "calls"


def written(record: Path) -> list[Path]:
    return sorted(record.parent.glob(record.name + "*"))


def sums(group: pycomm.Group, n: int) -> None:
    for _ in range(n):
        pycomm.all_reduce(X.copy(), group=group)


def test_successful_run_writes_no_flight_recorder_file(record: Path) -> None:
    run_ranks(2, sums, 3)
    assert written(record) == []


def test_survivors_of_a_killed_rank_write_their_last_calls(record: Path) -> None:
    kill = FaultPlan(rank=1, action="kill", at="all_reduce", after_bytes=1 << 16)
    ended = run_ranks(
        3, sums, 1000, transport="shm", processes=True, faults=[kill], return_exceptions=True
    )
    assert f"; the last calls are in {record}.world.0" in str(ended[0])
    assert [path.name for path in written(record)] == ["calls.world.0", "calls.world.2"]
    first = flight_recorder.read(written(record)[0])
    assert (first.rank, first.size, first.name) == (0, 3, "world")
    assert "rank 1" in first.reason
    last = first.records[-1]
    assert flight_recorder.title(last) == "all_reduce(float32, 1,000, sum)"
    assert flight_recorder.bytes_of(last) == X.nbytes
    assert last["outcome"] == flight_recorder.TABLES["outcome"].index("failed")
    assert last["ended"] > last["begun"]
    text = flight_report.report(written(record))
    assert "no record of ranks 1: killed, stuck or busy" in text
    assert f"rank 2 ({first.host}, pid " in text


def test_rank_that_is_behind_is_named(record: Path) -> None:
    timed_out = threading.Barrier(2)

    def late(group: pycomm.Group) -> None:
        sums(group, 300)
        if group.rank == 1:
            timed_out.wait(60)  # otherwise the other rank would see the end of this rank first
            group.abort("its rank aborted")
            return
        with pytest.raises(errors.Timeout):
            pycomm.all_reduce(X.copy(), group=group, timeout_s=0.3)
        timed_out.wait(60)

    run_ranks(2, late)
    lines = flight_report.report(written(record)).splitlines()
    behind = [line for line in lines if "is behind" in line]
    assert len(behind) == 1
    assert behind[0].startswith("  rank 1 is behind: its last call is call 3")
    row = next(line.split("  ") for line in lines if line.endswith("not called"))
    assert [word.strip() for word in row if word][1] == "all_reduce(float32, 1,000, sum)"
    kept = flight_recorder.read(written(record)[0]).records
    assert len(kept) == 256
    assert np.all(np.diff(kept["begun"]) > 0)
    assert "its rank aborted" in lines[2]


def test_mismatch_is_shown_with_both_calls(record: Path) -> None:
    def differ(group: pycomm.Group) -> None:
        sums(group, 2)
        with pytest.raises(errors.Mismatch):
            pycomm.all_reduce(X[: 10 + group.rank].copy(), group=group)
        assert "ranks disagree" in flight_recorder.read(f"{record}.world.{group.rank}").reason
        sums(group, 1)
        group.abort("enough")

    run_ranks(2, differ, return_exceptions=True)  # the rank that the other one aborts
    text = flight_report.report(written(record))
    assert text.count("enough") == 2  # the failure of the group overwrites the file
    both = "all_reduce(float32, 10, sum), all_reduce(float32, 11, sum)"
    assert f"ranks disagree about call 3: {both}" in text
    assert "DISAGREE" in text


def _disagree_in_torch(record: str) -> None:
    import torch
    import torch.distributed as dist

    os.environ["PYCOMM_FLIGHT_RECORD"] = record
    try:
        part = dist.new_group([0, 1])
    finally:
        del os.environ["PYCOMM_FLIGHT_RECORD"]  # the process serves other tests
    with pytest.raises(errors.Mismatch, match="the last calls are in"):
        dist.all_reduce(torch.ones(8 + dist.get_rank()), group=part)


def test_calls_through_torch_are_recorded(run: Run, record: Path) -> None:
    run(2, _disagree_in_torch, str(record))
    lasts = [
        flight_recorder.title(flight_recorder.read(path).records[-1]) for path in written(record)
    ]
    assert lasts == ["all_reduce(float32, 8, sum)", "all_reduce(float32, 9, sum)"]


def test_path_without_a_folder_is_rejected_with_the_variable_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOMM_FLIGHT_RECORD", str(tmp_path / "none" / "calls"))
    with pytest.raises(errors.InvalidArgument, match=r"invalid PYCOMM_FLIGHT_RECORD .*none"):
        run_ranks(1, sums, 1)


def example_file(calls: int) -> bytes:
    head = np.zeros(1, flight_recorder.HEAD)
    head["magic"], head["begun"], head["size"] = flight_recorder.MAGIC, calls, 2
    records = np.zeros(calls, flight_recorder.CALL)
    return head.tobytes().ljust(flight_recorder.HEAD_BYTES, b"\0") + records.tobytes()


@SETTINGS
@given(st.binary(max_size=200), st.integers(0, flight_recorder.HEAD_BYTES + 200), st.integers(0, 3))
def test_arbitrary_bytes_are_a_file_or_rejected(noise: bytes, at: int, calls: int) -> None:
    sound = example_file(calls)
    for data in (noise, flight_recorder.MAGIC + noise, sound[:at], sound[:at] + noise + sound[at:]):
        try:
            read = flight_recorder.parse(data, "noise")
        except errors.InvalidArgument:  # the other allowed outcome
            continue
        assert all(flight_recorder.title(call) for call in read.records)
        assert len(read.records) <= len(data) // flight_recorder.CALL.itemsize


@pytest.mark.parametrize("field", flight_recorder.TABLES)
def test_unknown_call_kind_is_rejected(field: str) -> None:
    sound = bytearray(example_file(2))
    sound[flight_recorder.HEAD_BYTES + flight_recorder.CALL.fields[field][1]] = 255
    with pytest.raises(errors.InvalidArgument, match=f"is damaged: a call has an unknown {field}"):
        flight_recorder.parse(bytes(sound), "x")


def test_truncated_file_is_rejected() -> None:
    assert len(flight_recorder.parse(example_file(2), "x").records) == 2
    with pytest.raises(errors.InvalidArgument, match="x is damaged: it declares 2 calls"):
        flight_recorder.parse(example_file(2)[:-1], "x")


def test_command_reports_an_invalid_file(tmp_path: Path) -> None:
    (tmp_path / "garbage").write_text("{}")
    command = [sys.executable, "-m", "pycomm", "info", "--flight", str(tmp_path / "garbage")]
    done = finished(command, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"pycomm info: {tmp_path / 'garbage'} is not a flight record")


def test_text_in_a_file_cannot_control_the_terminal() -> None:
    sound: Any = bytearray(example_file(0))
    at = flight_recorder.HEAD.fields["name"][1]
    sound[at : at + 5] = b"a\x1b[2J"
    assert flight_recorder.parse(bytes(sound), "").name == "a?[2J"


def wait_for_missing_rank(group: pycomm.Group, over: threading.Event) -> str:
    if group.rank == 1:
        assert over.wait(60)
        return ""
    with pytest.raises(errors.Timeout) as caught:
        pycomm.all_reduce(X.copy(), group=group, timeout_s=0.2)
    over.set()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_file_is_not_written_through_a_link_of_another_user(record: Path, kind: str) -> None:
    """In a shared folder, such as /tmp, the name is predictable."""
    other_file, place = record.parent / "precious", Path(f"{record}.world.0")
    if kind == "link":
        other_file.write_text("mine")
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(other_file)
    text = run_ranks(2, wait_for_missing_rank, threading.Event())[0]
    assert f"no flight record could be written to {place}: " in text
    assert ("symbolic link" in text) == (kind != "pipe")
    assert other_file.exists() == (kind == "link")
    if kind == "link":
        assert other_file.read_text() == "mine"


def test_a_trace_is_not_written_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOMM_TRACE", str(tmp_path))
    other_file = tmp_path / "precious"
    other_file.write_text("mine")
    (tmp_path / "world.0.trace").symlink_to(other_file)
    with pytest.raises(errors.InvalidArgument, match="path is a symbolic link"):
        run_ranks(1, sums, 1)
    assert other_file.read_text() == "mine"
