"""`pycomm launch --replace`: new processes take the ranks of those that failed."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from sample import of_the_day
from test_launch import CLEAN, LAUNCH, LIMIT_S, PROGRAM, SECRET, WHY_NOT, launch, report_of

from pycomm.bench.support.netns import Network
from pycomm.errors import InvalidArgument
from pycomm.launch.hosts import Hosts, Place
from pycomm.launch.losses import Losses, Replacement


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


def test_more_ranks_than_there_are_are_refused(tmp_path: Path) -> None:
    done = launch(tmp_path, "--nproc", "1", "--min-ranks", "2", PROGRAM, "place")
    assert done.returncode == 2
    assert done.stderr.startswith("pycomm launch: --min-ranks 2: expected at most 1")


@pytest.mark.parametrize("other", [str(Replacement(2, 0)), str(Replacement(1, 1)), ""])
def test_hosts_must_agree_on_the_replacement(other: str) -> None:
    hosts = Hosts(None, 0, 2)
    mine = Replacement(1, 0)
    places = [Place("", "a", 2, 0, True, options) for options in (str(mine), other)]
    with pytest.raises(InvalidArgument, match="must be equal on all hosts"):
        Losses(mine, hosts, places, "/nowhere/file")


def reports(folder: Path) -> dict[str, Any]:
    """The reports of the processes that took part at the end, by log."""
    logs = sorted((folder / "log").glob("*.log"))
    return {log.stem: report_of(log) for log in logs if "{" in log.read_text()}


def test_a_spare_takes_the_rank_of_a_failed_one(tmp_path: Path) -> None:
    """The process that replaces it becomes a spare, and takes the rank of the next one."""
    options = ["--nproc", "2", "--spares", "1", "--replace", "1"]
    done = launch(tmp_path, *options, PROGRAM, "lost", "1:second", "0:late")
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"\| replacement +\| spares: 1; new processes: 1 in place of each", done.stdout
    )
    found = {log: report["rank"] for log, report in reports(tmp_path).items()}
    assert found == {"spare0": 1, "rank1": 0}, "rank 0's second process was not needed"
    assert "Traceback" not in (tmp_path / "log" / "rank0.log").read_text()


def test_spares_alone_replace_ranks(tmp_path: Path) -> None:
    done = launch(tmp_path, "--nproc", "2", "--spares", "3", PROGRAM, "lost", "0", "0")
    assert done.returncode == 0, done.stderr
    found = reports(tmp_path)
    assert sorted(found) == sorted({"rank1", *found}), "rank 1 lived"
    assert [one["rank"] for log, one in found.items() if log.startswith("spare")] == [0]
    logs = [log.stem for log in (tmp_path / "log").glob("spare*.log")]
    assert sorted(logs) == ["spare0", "spare1", "spare2"]
    assert done.stderr.count("ended by signal 9 and is not replaced") == 2


def test_the_ranks_that_are_left_continue(tmp_path: Path) -> None:
    """They do not wait for processes that cannot come. Ranks are renumbered, and a new process gets
    the rank of the one that it replaces."""
    options = ["--nproc", "4", "--replace", "1", "--min-ranks", "3"]
    done = launch(tmp_path, *options, PROGRAM, "lost", "1:again", "3")
    assert done.returncode == 0, done.stderr
    found = {log: (report["rank"], report["ranks"]) for log, report in reports(tmp_path).items()}
    left = [0, 2, 3]
    assert found == {"rank0": (0, left), "rank2": (1, left), "rank3": (2, left)}
    assert "rank 1 ended by signal 9 and is not replaced" in done.stderr
    assert "rank 3 ended by signal 9; starting a new process in its place, 1 of" in done.stderr


def test_the_run_ends_when_too_few_ranks_are_left(tmp_path: Path) -> None:
    done = launch(tmp_path, "--nproc", "4", "--min-ranks", "3", PROGRAM, "lost", "1", "3")
    assert done.returncode == 137
    lines = [line for line in done.stderr.splitlines() if "is not replaced" not in line]
    assert lines[0] == (
        "pycomm launch: too few processes are left for --min-ranks 3: 2; the run ends"
    )
    assert lines[1].startswith("pycomm launch: the first failure was rank 1 on host")
    assert lines[2].startswith("pycomm launch: then rank 3 on host")
    assert reports(tmp_path) == {}


def start_hosts(net: Network, folder: Path, ranks: list[int], *arguments: str) -> list[Any]:
    """The launchers of hosts with so many ranks each; with 0, a host of one spare."""
    meeting = ["--nnodes", str(len(ranks)), "--rdzv-endpoint", f"{net.hosts[0].ipv4()}:29400"]
    spares = {n: ["--spares", str(int(n == 0))] if 0 in ranks else [] for n in ranks}
    return [
        host.start(
            [
                *(*LAUNCH, *meeting, "--nproc", str(n), *spares[n]),
                *(f"--log-dir={folder / 'log'}", *arguments),
            ],
            {"PYTHONPATH": CLEAN["PYTHONPATH"], "PYCOMM_SECRET": SECRET},
        )
        for host, n in zip(net.hosts, ranks, strict=True)
    ]


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_rank_of_another_host_fails(tmp_path: Path) -> None:
    """Its process ends with an exception, which the other host does not see."""
    with Network(2, ipv6=False) as net:
        arguments = ["--replace", "1", PROGRAM, "replaced", "2:raise"]
        for process in start_hosts(net, tmp_path, [2, 1], *arguments):
            out, err = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, out + err
    assert {log: one["size"] for log, one in reports(tmp_path).items()} == {
        f"rank{rank}": 3 for rank in range(3)
    }


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize(
    ("ranks", "options", "lost"),
    [
        ([1, 2], ["--spares", "1"], 0),  # with the rendezvous
        *of_the_day([([1, 2], ["--min-ranks", "2"], 0), ([2, 1], ["--min-ranks", "2"], 1)], 2),
    ],
)
def test_a_host_is_lost(tmp_path: Path, ranks: list[int], options: list[str], lost: int) -> None:
    """A spare of the other host takes its rank, or the others continue without."""
    with Network(2, ipv6=False) as net:
        started = start_hosts(net, tmp_path, ranks, *options, PROGRAM, "lost_host")
        limit = threading.Timer(LIMIT_S, started[lost].kill)  # ends the line below
        limit.start()
        assert any(line.startswith("ready") for line in started[0].stdout)
        limit.cancel()
        started[lost].kill()
        out, err = started[1 - lost].communicate(timeout=LIMIT_S)
        assert started[1 - lost].returncode == 0, out + err
    found = {log: report["ranks"] for log, report in reports(tmp_path).items()}
    if "--spares" in options:
        assert found == {"rank1": [0, 1, 2], "rank2": [0, 1, 2], "spare1": [0, 1, 2]}
    else:
        left = [1, 2] if lost == 0 else [0, 1]
        assert found == {f"rank{rank}": left for rank in left}
        assert f"host {lost} of 2 (from 0); its {ranks[lost]} processes count as lost" in out


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("ranks", of_the_day([[2, 1, 0], [0, 1, 2]], 2))
def test_a_spare_host_takes_the_place_of_a_lost_one(tmp_path: Path, ranks: list[int]) -> None:
    """Also if it is the first, which serves the rendezvous."""
    with Network(3, ipv6=False) as net:
        started = start_hosts(net, tmp_path, ranks, PROGRAM, "lost_host")
        limit = threading.Timer(LIMIT_S, started[ranks.index(2)].kill)  # ends the line below
        limit.start()
        assert any(line.startswith("ready") for line in started[ranks.index(2)].stdout)
        limit.cancel()
        started.pop(1).kill()
        for process in started:
            out, err = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, out + err
    found = {log: report["ranks"] for log, report in reports(tmp_path).items()}
    left = ["rank0", "rank1"] if ranks[0] else ["rank1", "rank2"]
    assert found == {log: [0, 1, 2] for log in [*left, "spare0"]}
