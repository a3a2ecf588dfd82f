"""The benchmark of collectives: its arithmetic on fixed times, and tiny real runs."""

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.collectives import link_rank, links
from benchmarks.training import training
from benchmarks.training.models import TASKS
from pycomm import bench as command
from pycomm.bench.collectives import benchmark as collectives
from pycomm.bench.collectives import (
    bursts,
    limits,
    mpi,
    table,
    verbs,
)
from pycomm.bench.collectives.worker import Times
from pycomm.bench.support import netns, summaries
from pycomm.bench.support.sizes import parse_sizes


@pytest.mark.parametrize(
    ("written", "sizes"),
    [
        ("4", [4]),
        ("4:64", [4, 8, 16, 32, 64]),
        ("4:64:4", [4, 16, 64]),
        ("4:100:4", [4, 16, 64]),
        ("1,1K,1.5M,2G", [1, 1024, 3 << 19, 2 << 30]),
        ("64kB", [65536]),
    ],
)
def test_sizes_are_parsed(written: str, sizes: list[int]) -> None:
    assert parse_sizes(written) == sizes


@pytest.mark.parametrize("written", ["", "M", "0", "-4", "0.3", "4x", "8:4", "4:8:1", "1:2:3:4"])
def test_invalid_sizes_are_rejected(written: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_sizes(written)


@pytest.mark.parametrize(
    ("verb", "count", "size_bytes", "bus_factor"),
    [
        ("all_reduce", 1024, 4096, 1.5),
        ("broadcast", 1024, 4096, 1),
        ("all_gather", 256, 4096, 0.75),
        ("reduce_scatter", 256, 4096, 0.75),
    ],
)
def test_counts_and_factors_are_those_of_nccl_tests(
    verb: str, count: int, size_bytes: int, bus_factor: float
) -> None:
    case = verbs.Case(verb, "float32", 4096, 4)
    assert (case.count, case.bytes) == (count, size_bytes)
    assert verbs.VERBS[verb].bus_factor(4) == bus_factor
    assert verbs.Case(verb, "float64", 1, 4).count == 1


def right_call(arrays: verbs.Arrays) -> Callable[[], object]:
    """The verb, executed by one process that knows the inputs of all ranks."""
    return lambda: arrays.output.copy_(arrays.expected())


@pytest.mark.parametrize("dtype", verbs.DTYPES)
@pytest.mark.parametrize("verb", list(verbs.VERBS))
def test_wrong_elements_are_counted(verb: str, dtype: str) -> None:
    arrays = verbs.Arrays(verbs.Case(verb, dtype, 4096, 3), rank=1)
    right = right_call(arrays)
    assert arrays.wrong(right) == 0
    assert arrays.wrong(lambda: None) > 0  # the correct result of an earlier call does not count

    def swap_two() -> None:
        right()
        first = int((arrays.output != arrays.output[0]).nonzero()[0])
        arrays.output[[0, first]] = arrays.output[[first, 0]]

    assert arrays.wrong(swap_two) == 2


def times(gloo: list[list[float]], ours: list[list[float]], wrong: int = 0) -> Times:
    """The report of a rank for an all_reduce of 1 MB with a copy of 10 us, or 30 us reversed."""
    return Times(
        case=verbs.Case("all_reduce", "float32", 2**20, 2),
        wrong={"pycomm": wrong, "gloo": 0},
        refused={},
        seconds={"pycomm": ours, "gloo": gloo, "copy plain": [[30e-6]], "copy libc": [[10e-6]]}
        | {"copy in place": [[20e-6]]},
    )


def test_results_are_those_of_the_slowest_rank() -> None:
    fast = times([[300e-6] * 3] * 3, [[20e-6] * 3] * 3)
    slow = times([[400e-6] * 3] * 3, [[40e-6, 50e-6, 90e-6], [60e-6] * 3, [10e-6] * 3], wrong=2)
    ours, gloo = table.lines([fast, slow])
    assert (ours.peer, gloo.peer) == ("pycomm", "gloo")
    assert ours.time_us == pytest.approx(50)  # the median of 50, 60, 10
    assert ours.p99_us == pytest.approx(90)
    assert ours.ratio == pytest.approx(8)
    assert gloo.ratio == 1
    assert ours.limit_percent == pytest.approx(20)  # two ranks: reads S, writes S, like the copy
    assert ours.algbw_gbs == pytest.approx(2**20 / 50e3)
    assert ours.busbw_gbs == ours.algbw_gbs
    assert ours.wrong == 2
    assert (ours.worst_us, ours.rounds) == (pytest.approx(60), 3)


def test_faults_are_reported() -> None:
    good = times([[400e-6]], [[50e-6]])
    assert table.faults(table.lines([good, good])) == []
    bad = times([[400e-6]], [[9e-6]], wrong=3)
    wrong, too_fast = table.faults(table.lines([good, bad]) + table.lines([bad, bad]))[1:]
    assert "6 elements are wrong" in wrong
    assert "111 % of the limit" in too_fast


def test_the_limit_reads_what_was_just_written() -> None:
    copies = limits.copies(100)
    read = inspect.getclosurevars(copies.rewrite).nonlocals["source"]
    for way in copies.ways.values():
        read.fill_(7)
        way()
        copies.rewrite()
        assert bool((read == 1).all())


@pytest.mark.parametrize("ours", ["pycomm", "pycomm-direct", "pycomm-shared"])
def test_tiny_run_is_correct(ours: str, tmp_path: Path) -> None:
    # Without the staged copy.
    ops = ["all_reduce"] if ours == "pycomm-shared" else list(verbs.VERBS)
    json_to, plot_to = tmp_path / "bench.json", tmp_path / "bench.png"
    args = ["collectives", "--sizes", "4,64K", "--ops", ",".join(ops), "--ours", ours]
    args += ["--rounds", "2", "--json", str(json_to), "--plot", str(plot_to)]
    assert command.main(args) == 0
    stored = summaries.read(json_to)
    rows = stored["rows"]
    assert len(rows) == 2 * 2 * len(ops)
    assert {row["peer"] for row in rows} == {"gloo", ours}
    assert all(row["wrong"] == 0 and row["time_us"] > 0 and row["ratio"] > 0 for row in rows)
    assert stored["machine"]["torch"] == torch.__version__
    assert plot_to.read_bytes().startswith(b"\x89PNG")


def test_results_are_correct_beside_a_busy_thread(tmp_path: Path) -> None:
    stored = tmp_path / "bench.json"
    args = ["--busy", "--sizes", "4,64K", "--rounds", "1", "--json", str(stored)]
    assert collectives.main(args) == 0
    content = summaries.read(stored)
    assert content["settings"]["busy"]
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in content["rows"])


@pytest.mark.parametrize("by", [[], ["--mpi-prefix", f"mpich={sys.prefix}"]], ids=["own", "prefix"])
def test_mpi_and_the_memory_limit_are_measured(by: list[str], tmp_path: Path) -> None:
    stored = tmp_path / "bench.json"
    args = ["--sizes", "64", "--ops", ",".join(verbs.VERBS), "--rounds", "1", "--ours", "pycomm"]
    assert collectives.main([*args, *by, "--peers", "mpich,fake", "--json", str(stored)]) == 0
    rows = summaries.read(stored)["rows"]
    assert {row["mpi"] for row in rows} == {"mpich"}
    assert [row["peer"] for row in rows] == ["pycomm", "mpich", "fake"] * len(verbs.VERBS)
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in rows)


def test_each_mpi_has_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mpich starts the ranks of both runs, since tests have no other MPI."""
    monkeypatch.setattr(mpi, "missing", lambda name, prefix: "")
    by_mpich, runs = mpi.run, []

    def run(source: tuple[str, Path | None], body: object, args: tuple, *others: object) -> None:
        runs.append((source, [peer.name for peer in args[1]]))
        contestants = [peer for peer in args[1] if peer.name != "openmpi"]
        by_mpich(("mpich", None), body, (args[0], contestants, *args[2:]), *others)

    monkeypatch.setattr(mpi, "run", run)
    stored = tmp_path / "bench.json"
    args = ["--sizes", "64", "--rounds", "1", "--ours", "pycomm", "--peers", "mpich,openmpi"]
    args += ["--mpi-prefix", "openmpi=/opt/mpi", "--json", str(stored)]
    assert collectives.main(args) == 0
    assert runs == [
        (("mpich", None), ["pycomm", "mpich"]),
        (("openmpi", Path("/opt/mpi")), ["pycomm", "openmpi"]),
    ]
    rows = [(row["mpi"], row["peer"]) for row in summaries.read(stored)["rows"]]
    assert rows == [("mpich", "pycomm"), ("mpich", "mpich"), ("openmpi", "pycomm")]


@pytest.mark.parametrize(
    "args",
    [
        ["--peers", "smoke"],
        ["--peers", "mpich", "--mpi-prefix", "mpich"],
        ["--peers", "mpich", "--mpi-prefix", "mpich=/no/such/folder"],
        ["--peers", "intelmpi"],  # not installed
        ["--peers", "deepspeed"],  # not installed
        ["--sizes", "x"],
        ["--ranks", "1"],
    ],
)
def test_invalid_options_are_rejected(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        collectives.main(args)
    assert "bench collectives: error" in capsys.readouterr().err


def test_training_results_are_those_of_the_slowest_rank() -> None:
    first = {"gloo": [[0.2]], "pycomm": [[0.1]], "fake": [[0.08]], "alone": [[0.075]]}
    second = {"gloo": [[0.3]], "pycomm": [[0.05]], "fake": [[0.09]]}
    gloo, ours, fake, alone = training.rows(
        "1gbit", [training.RankTimes("mlp", 30, first), training.RankTimes("mlp", 30, second)]
    )
    assert (gloo.ratio, fake.of_fake_percent, alone.efficiency_percent) == (1, 100, 100)
    assert ours.step_ms == pytest.approx(100)
    assert ours.samples_per_second == pytest.approx(600)
    assert alone.samples_per_second == pytest.approx(400)
    assert ours.ratio == pytest.approx(3)
    assert ours.of_fake_percent == pytest.approx(90)
    assert ours.efficiency_percent == pytest.approx(75)
    assert len(training.text(ours)) == len(training.HEADER)


def test_tiny_training_run_is_stored_and_plotted(tmp_path: Path) -> None:
    json_to, plot_to = tmp_path / "bench.json", tmp_path / "bench.png"
    args = ["training", "--models", "mlp", "--rounds", "1", "--steps", "1"]
    assert command.main([*args, "--json", str(json_to), "--plot", str(plot_to)]) == 0
    stored = summaries.read(json_to)
    assert [row["backend"] for row in stored["rows"]] == [
        *("gloo", "pycomm", "wrapper", "dgc", "fused", "fake", "alone")
    ]
    assert all(row["step_ms"] > 0 for row in stored["rows"])
    assert plot_to.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())
def test_tiny_training_run_between_hosts_obeys_the_link_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_to = tmp_path / "bench.json"
    args = ["training", "--models", "mlp", "--rounds", "1", "--steps", "1"]
    args += ["--rates", "400mbit,800mbit", "--json", str(json_to)]
    assert command.main(args) == 0
    stored = summaries.read(json_to)
    lines = capsys.readouterr().out.split("# s/step")[1].splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["mlp", "400mbit"], ["mlp", "800mbit"]]
    assert stored["settings"]["rates"] == "400mbit,800mbit"
    assert list(dict.fromkeys(row["rate"] for row in stored["rows"])) == ["400mbit", "800mbit"]
    took_ms = {row["backend"]: row["step_ms"] for row in stored["rows"][:7]}
    assert list(took_ms) == ["gloo", "pycomm", "wrapper", "dgc", "fused", "fake", "alone"]
    assert min(took_ms.values()) > 0
    gradients = sum(p.nbytes for p in TASKS["mlp"].model().parameters())
    line_ms = 1e3 * gradients / (400e6 / 8)  # with two ranks each sends that much
    assert min(took_ms[dense] for dense in ("gloo", "pycomm", "wrapper")) > 0.9 * line_ms


def link_reports(seconds: dict[str, float], cpu_s: float) -> link_rank.RankTimes:
    names = list(seconds)
    return link_rank.RankTimes(
        verb="all_reduce",
        size_bytes=10**8,
        wrong=dict.fromkeys(names, 1),
        seconds={name: [[s, s, 9.0]] for name, s in seconds.items()},
        cpu_s={name: [[cpu_s]] for name in names},
    )


def test_link_results_count_the_bytes_that_a_host_must_send() -> None:
    by_rank = [link_reports({"pycomm": 0.1, "gloo": 0.2}, c) for c in (0.03, 0.05)]
    by_rank.append(link_reports({"pycomm": 0.2, "gloo": 0.5}, 0.04))
    by_rank.append(by_rank[0])
    ours, gloo = links.rows_of("4gbit", 2, by_rank)  # two ranks on each of two hosts
    assert (ours.wrong, gloo.ratio, ours.time_ms) == (4, 1, 200)
    assert ours.ratio == pytest.approx(2.5)
    assert ours.bandwidth_gbs == pytest.approx(0.5)
    assert ours.line_percent == pytest.approx(100)
    assert ours.cpu_s_per_gb == pytest.approx((0.03 + 0.05 + 0.04 + 0.03) / 2 / 0.1)
    assert len(links.text(ours)) == len(links.HEADER) + len("100000000") - 6
    assert links.rows_of("none", 2, by_rank)[0].line_percent is None
    assert links.rows_of("none", 4, by_rank)[0].bandwidth_gbs == pytest.approx(0.75)


@pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())
def test_tiny_run_between_hosts_is_stored_and_plotted(tmp_path: Path) -> None:
    json_to, plot_to = tmp_path / "bench.json", tmp_path / "bench.png"
    args = ["links", "--rates", "1gbit", "--sizes", "64K", "--rounds", "1"]
    args += ["--hosts", "3", "--peers", "pycomm,gloo,sockets"]
    assert command.main([*args, "--json", str(json_to), "--plot", str(plot_to)]) == 0
    stored = summaries.read(json_to)
    assert [(row["rate"], row["peer"]) for row in stored["rows"]] == [
        ("1gbit", peer) for peer in ("pycomm", "gloo", "sockets")
    ]
    assert all(row["time_ms"] > 0 and row["cpu_s_per_gb"] > 0 for row in stored["rows"])
    assert plot_to.read_bytes().startswith(b"\x89PNG")


def test_missing_network_namespaces_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert links.main([]) == 2
    assert "needs root" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        training.main(["--rates", "1gbit"])
    assert "--rates needs root" in capsys.readouterr().err


def series(bound: bool, *us: float, peer: str = "pycomm-direct") -> bursts.Series:
    case = verbs.Case("all_reduce", "float32", 4096, 2)
    return bursts.Series(case, peer, 4, bound, [one / 1e6 for one in us])


def test_bursts_of_the_slowest_rank_are_compared_with_bound_ranks() -> None:
    by_rank = [
        [series(True, 10, 12, 11), series(False, 9, 16, 10)],
        [series(True, 11, 11, 11), series(False, 11, 18, 30)],
    ]
    (row,) = bursts.rows_of(by_rank)
    assert row.bound_us == pytest.approx(11)
    assert row.median_us == pytest.approx(18)
    assert row.worst_us == pytest.approx(30)
    assert (row.slow, row.bursts) == (2, 3)
    (sentence,) = bursts.faults([row])
    assert "all_reduce of 4K, buffers=4: 2 of 3 bursts" in sentence


def test_slow_bursts_of_other_libraries_are_no_fault() -> None:
    by_rank = [[series(True, 10, peer="gloo"), series(False, 99, peer="gloo")]]
    assert bursts.faults(bursts.rows_of(by_rank)) == []


def test_bursts_within_the_limit_are_no_fault() -> None:
    by_rank = [[series(True, 10, 10), series(False, 15, 10)]]
    (row,) = bursts.rows_of(by_rank)
    assert row.slow == 0
    assert bursts.faults([row]) == []


def test_bursts_after_a_pause(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stored = tmp_path / "idle.json"
    options = ["--idle", "0.001", "--rounds", "2", "--sizes", "4K", "--peers", "gloo"]
    # The exit status says whether a burst was slow, as it may be beside other tests.
    assert collectives.main([*options, "--ours", "pycomm-direct", "--json", str(stored)]) in (0, 1)
    rows = summaries.read(stored)["rows"]
    assert [(row["peer"], row["buffers"]) for row in rows] == [
        ("pycomm-direct", 4),
        ("pycomm-direct", 1),
        ("gloo", 4),
        ("gloo", 1),
    ]
    assert all(row["bursts"] == 2 and row["bound_us"] > 0 for row in rows)
    assert "worst/bound" in capfd.readouterr().out
