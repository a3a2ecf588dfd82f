"""`pycomm launch --replace`: new processes take the ranks of those that failed."""

import re
from pathlib import Path

import pytest
from paths import ROOT
from test_launch import PROGRAM, launch, report_of

EXAMPLE = str(ROOT / "examples" / "replace.py")


@pytest.mark.parametrize("failures", [["1:kill"], ["0:kill", "2:raise"]])
def test_failed_ranks_are_replaced(tmp_path: Path, failures: list[str]) -> None:
    done = launch(tmp_path, "--nproc", "3", "--replace", "1", PROGRAM, "replaced", *failures)
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        log = tmp_path / "log" / f"rank{rank}.log"
        found = report_of(log)
        assert (found["rank"], found["size"]) == (rank, 3)
    for failure in failures:
        rank, how = failure.split(":")
        text = f"rank {rank} ended by {'signal 9' if how == 'kill' else 'an error'}; starting a new"
        assert text in done.stderr
    assert done.stderr.count("starting a new process in its place, 1 of at most 1") == len(failures)


def test_the_run_ends_when_a_rank_fails_too_often(tmp_path: Path) -> None:
    """The first group never forms: new processes start it again, until the limit."""
    done = launch(tmp_path, "--nproc", "2", "--replace", "2", PROGRAM, "fail_always")
    assert done.returncode != 0
    assert done.stderr.count("rank 1 ended by an error; starting a new process") == 2
    assert "pycomm launch: the first failure was rank" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--replace", "-1"], ["--replace", "1", "--nnodes", "2", "--rdzv-endpoint", "a:1"]],
)
def test_invalid_replacements_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    done = launch(tmp_path, *arguments, "--nproc", "1", PROGRAM, "place")
    assert done.returncode == 2
    assert "--replace" in done.stderr


def test_the_result_of_training_is_that_without_failures(tmp_path: Path) -> None:
    """Bit by bit: two ranks are killed, one of which serves the store."""
    last = []
    for options, program in ((["--replace", "1"], []), ([], ["--no-kills"])):
        done = launch(tmp_path, "--nproc", "3", *options, EXAMPLE, *program)
        assert done.returncode == 0, done.stderr
        logs = [(tmp_path / "log" / f"rank{rank}.log").read_text() for rank in range(3)]
        ends = {re.findall("checksum .*", log)[-1] for log in logs}
        assert len(ends) == 1, "equal on all ranks"
        last.append(ends)
    assert last[0] == last[1]
