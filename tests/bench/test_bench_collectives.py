"""The benchmarks of collectives, on one host and over links: arithmetic, and small real runs."""

import argparse
import dataclasses
import inspect
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_runs import stored

import pycomm
from benchmarks.collectives import bursts, link_rank, links, pauses
from benchmarks.training import training
from pycomm import bench
from pycomm.bench.collectives import benchmark as collectives
from pycomm.bench.collectives import cases, limits, table, verbs
from pycomm.bench.collectives.groups import Groups
from pycomm.bench.collectives.peers import OPERATORS, PEERS, Peer
from pycomm.bench.collectives.worker import Times
from pycomm.bench.support import netns
from pycomm.bench.support.sizes import names, parse_sizes
from pycomm.observe import flight_recorder
from pycomm.testing import run_ranks

NEEDS_HOSTS = pytest.mark.skipif(bool(netns.missing()), reason=netns.missing())


def test_names_are_chosen_by_patterns() -> None:
    """In the order of the list, each once."""
    parse = names(["adamw", "adamw topk", "soap", "soap topk"])
    assert parse("soap, adamw*, *topk") == ["soap", "adamw", "adamw topk", "soap topk"]
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"'muon\*' is not among adamw, adamw topk"
    ):
        parse("soap,muon*")


def test_sizes_are_parsed() -> None:
    assert parse_sizes("4:64") == [4, 8, 16, 32, 64]
    assert parse_sizes("4:64:4") == parse_sizes("4:100:4") == [4, 16, 64]
    assert parse_sizes("4,1K,1.5M,2G,64kB") == [4, 1024, 3 << 19, 2 << 30, 65536]
    for wrong in ("", "M", "0", "-4", "0.3", "4x", "8:4", "4:8:1", "1:2:3:4"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_sizes(wrong)


def test_counts_and_factors_are_those_of_nccl_tests() -> None:
    pieces = ("all_gather", "all_gather_v", "gather", "reduce_scatter", "scatter", "all_to_all")
    expected = dict.fromkeys(pieces, (256, 0.75)) | {"all_reduce": (1024, 1.5)}
    whole = ("reduce", "broadcast", "send_recv", "overlap", "p2p_latency")
    expected |= dict.fromkeys((*whole, "p2p_bandwidth", "p2p_bidirectional"), (1024, 1))
    found = {verb: cases.Case(verb, "float32", 4096, 4) for verb in expected}
    assert {*found, "barrier"} == {*cases.VERBS}
    assert {v: (c.count, c.kind.bus_factor(4)) for v, c in found.items()} == expected
    assert {case.bytes for case in found.values()} == {4096}
    assert {cases.Case(verb, "float64", 1, 4).count for verb in found} == {1}


def test_options_of_nccl_tests_choose_sizes() -> None:
    def sizes(words: str) -> list[int]:
        options = collectives._parser().parse_args(f"--ranks 3 {words}".split())
        return [case.bytes for case in collectives._cases(options) if not case.copies]

    assert sizes("-b 8 -e 64 -f 2 -d float") == sizes("--sizes 8:64") == [8, 16, 32, 64]
    assert sizes("-b 1K -e 3K -i 1K --ops barrier,reduce -r 2") == [0, 1024, 2048, 3072]
    assert sizes("-b 512M") == [2**29]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("verb", [verb for verb in cases.VERBS if verb != "barrier"])
def test_wrong_elements_are_counted(verb: str, dtype: str, copies: bool) -> None:
    """One process executes the verb, since it knows the inputs of all ranks."""
    root = 0 if verb in ("broadcast", "scatter") else 1  # of the rank that has something to receive
    arrays = verbs.Arrays(cases.Case(verb, dtype, 4096, 3, root, copies=copies), rank=1)
    right: Callable[[], object] = lambda: arrays.output.copy_(arrays.expected())  # noqa: E731 - read as one line
    assert arrays.wrong(right) == 0
    assert arrays.wrong(lambda: None) > 0  # the correct result of an earlier call does not count

    def swap_two() -> None:
        right()
        first = int((arrays.output != arrays.output[0]).nonzero()[0])
        arrays.output[[0, first]] = arrays.output[[first, 0]]

    assert arrays.wrong(swap_two) == 2


@pytest.mark.parametrize(
    ("verb", "place"),
    [("all_gather", 1024), ("gather", 1024), ("reduce_scatter", -1024), ("scatter", -1024)],
)
def test_in_place_arrays_are_those_of_nccl_tests(verb: str, place: int) -> None:
    """Where the input begins in the output, or the output in the input, of rank 1 of 4."""
    arrays = verbs.Arrays(cases.Case(verb, "float32", 4096, 4, root=1, copies=True), rank=1)
    assert arrays.input.data_ptr() - arrays.output.data_ptr() == place
    arrays = verbs.Arrays(cases.Case("all_reduce", "float32", 4096, 4, copies=True), rank=1)
    assert arrays.input.data_ptr() != arrays.output.data_ptr()


def times(gloo: list[list[float]], ours: list[list[float]], wrong: int = 0) -> Times:
    """The report of a rank for an all_reduce of 1 MB with a copy of 10 us, or 30 us reversed."""
    return Times(
        case=cases.Case("all_reduce", "float32", 2**20, 2),
        wrong={"pycomm": wrong, "gloo": 0},
        refused={},
        seconds={"pycomm": ours, "gloo": gloo, "copy plain": [[30e-6]], "copy libc": [[10e-6]]}
        | {"copy in place": [[20e-6]]},
    )


def test_results_are_those_of_the_slowest_rank() -> None:
    fast = times([[300e-6] * 3] * 3, [[20e-6] * 3] * 3)
    slow = times([[400e-6] * 3] * 3, [[40e-6, 50e-6, 90e-6], [60e-6] * 3, [10e-6] * 3], wrong=2)
    ours, gloo = table.lines([fast, slow])
    assert (ours.peer, gloo.peer, ours.wrong, ours.rounds) == ("pycomm", "gloo", 2, 3)
    assert ours.time_us == pytest.approx(50)  # the median of 50, 60, 10
    assert (ours.p99_us, ours.worst_us) == (pytest.approx(90), pytest.approx(60))
    assert (ours.ratio, gloo.ratio) == (pytest.approx(8), 1)
    assert ours.limit_percent == pytest.approx(20)  # two ranks: reads S, writes S, like the copy
    assert ours.busbw_gbs == ours.algbw_gbs == pytest.approx(2**20 / 50e3)


def test_wrong_results_and_a_wrong_limit_are_reported() -> None:
    good = times([[400e-6]], [[50e-6]])
    assert table.faults(table.lines([good, good])) == []
    bad = times([[400e-6]], [[9e-6]], wrong=3)
    wrong, too_fast = table.faults(table.lines([good, bad]) + table.lines([bad, bad]))[1:]
    assert "6 elements are wrong" in wrong
    assert "111 % of the limit" in too_fast


def test_the_limit_reads_what_was_just_written() -> None:
    ways, rewrite = limits.copies(100)
    read = inspect.getclosurevars(rewrite).nonlocals["source"]
    for way in ways.values():
        read.fill_(7)
        way()
        rewrite()
        assert bool((read == 1).all())


def series(bound: bool, *us: float, peer: str = "pycomm-direct") -> bursts.Series:
    case = cases.Case("all_reduce", "float32", 4096, 2)
    return bursts.Series(case, peer, 4, bound, [one / 1e6 for one in us])


def test_worst_burst_of_the_slowest_rank_is_compared_with_bound_ranks() -> None:
    first = [series(True, 10, 19, 11), series(False, 9, 16, 10)]
    second = [series(True, 11, 11, 11), series(False, 11, 18, 30)]
    (row,) = bursts.rows_of([first, second])
    assert (row["bound_us"], row["median_us"]) == (pytest.approx(11), pytest.approx(18))
    assert (row["worst_us"], row["slow"], row["bursts"]) == (pytest.approx(30), 2, 3)
    assert row["slow_bound"] == 1
    (sentence,) = bursts.faults([row])
    assert "all_reduce of 4K, buffers=4: 2 of 3 bursts" in sentence
    within = [series(True, 10, 10), series(False, 15, 10)]
    others = [series(True, 10, peer="gloo"), series(False, 99, peer="gloo")]
    assert bursts.faults([*bursts.rows_of([within]), *bursts.rows_of([others])]) == []


@pytest.fixture
def any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other tests the limit is not measured well, and bursts are slow."""
    monkeypatch.setattr(table, "TOLERANCE", math.inf)
    monkeypatch.setattr(bursts, "SLOWEST", math.inf)


@pytest.mark.usefixtures("any_speed")
@pytest.mark.parametrize(
    ("more", "chosen"), [("-r 1", [*cases.VERBS]), ("--busy", ["all_reduce"])], ids=["all", "busy"]
)
def test_collectives_run(more: str, chosen: list[str], tmp_path: Path) -> None:
    words = f"collectives --sizes 4,64K --rounds 1 --ops {','.join(chosen)} {more}"
    content = stored(tmp_path, words, plot=True)
    assert content["settings"]["busy"] == (more == "--busy")
    assert content["machine"]["torch"] == torch.__version__
    found = [(row["verb"], row["peer"]) for row in content["rows"]]
    peers = {verb: ["pycomm", "pycomm-direct", "gloo"] for verb in cases.VERBS}
    peers["all_reduce"].insert(2, "pycomm-shared")  # which refuses other verbs
    times = {verb: 1 if verb == "barrier" else 2 for verb in cases.VERBS}
    assert found == [
        (verb, peer) for verb in chosen for _ in range(times[verb]) for peer in peers[verb]
    ]
    for row in content["rows"]:
        assert row["wrong"] == 0
        assert row["time_us"] > 0 < row["ratio"]
        both = not cases.VERBS[row["verb"]].alone and row["peer"] != "pycomm-shared"
        assert (row["other_us"] is not None, row["other_wrong"]) == (both, 0 if both else None)
        assert row["root"] == (1 if cases.VERBS[row["verb"]].rooted and more == "-r 1" else -1)


@pytest.mark.usefixtures("any_speed")
def test_mpi_and_the_memory_limit_are_measured(tmp_path: Path) -> None:
    words = f"collectives --sizes 64 --ops {','.join(cases.VERBS)} --rounds 1 --ours pycomm "
    words += f"--peers mpich,fake --mpi-prefix mpich={sys.prefix}"
    rows = stored(tmp_path, words)["rows"]
    assert {row["mpi"] for row in rows} == {"mpich"}
    assert [row["peer"] for row in rows] == ["pycomm", "mpich", "fake"] * len(cases.VERBS)
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in rows)


NCCL_ROW = re.compile(
    r"^ *(?P<size>\d+) +(?P<count>\d+) +(?P<type>\w+) +(?P<redop>\w+) +(?P<root>-?\d+)"
    r" +(?P<out_us>[\d.]+) +(?P<out_alg>[\d.]+) +(?P<out_bus>[\d.]+) +(?P<out_wrong>\d+|N/A)"
    r" +(?P<in_us>[\d.]+) +(?P<in_alg>[\d.]+) +(?P<in_bus>[\d.]+) +(?P<in_wrong>\d+|N/A)"
)
"""A row of nccl-tests 2.17, as parsers of its output read it."""
OF_NCCL = (
    "all_reduce,reduce,broadcast,all_gather,gather,reduce_scatter,scatter,all_to_all,send_recv"
)


@pytest.mark.usefixtures("any_speed")
def test_a_parser_of_nccl_tests_reads_the_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = f"collectives -b 64 -e 4K -f 8 -n 4 -w 1 -d float,half -o max -r 1 --ops {OF_NCCL} "
    content = stored(tmp_path, words + "--ours pycomm-direct --peers gloo --rounds 1")
    text = capfd.readouterr().out
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [NCCL_ROW.match(line) for line in lines]
    assert all(found), [line for line, row in zip(lines, found, strict=True) if not row]
    rows = [row.groupdict() for row in found if row]
    assert len(rows) == len(content["rows"]) == 9 * 2 * 3 * 2
    for row, known in zip(rows, content["rows"], strict=True):
        assert (int(row["size"]), int(row["count"])) == (known["size_bytes"], known["count"])
        assert row["type"] == {"float32": "float", "float16": "half"}[known["dtype"]]
        assert (row["redop"], int(row["root"])) == (known["redop"], known["root"])
        assert row["redop"] in ("max", "none")
        assert (row["out_wrong"], row["in_wrong"]) == ("0", "0")
        native, other = (
            ("in_us", "out_us") if cases.VERBS[known["verb"]].in_place else ("out_us", "in_us")
        )
        assert float(row[native]) == pytest.approx(known["time_us"], abs=0.06, rel=1e-3)
        assert float(row[other]) == pytest.approx(known["other_us"], abs=0.06, rel=1e-3)
    assert re.search(r"^# +size +count +type +redop +root +time +algbw +busbw", text, re.M)
    assert re.search(r"^# warmup iters: 1 iters: 4 rounds: 1 validate: 1", text, re.M)
    assert re.search(r"^# Out of bounds values : 0 OK$", text, re.M)
    mean = re.search(r"^# Avg bus bandwidth    : ([\d.e-]+)$", text, re.M)
    assert mean is not None
    assert float(mean[1]) > 0
    assert re.search(r"^# Avg bus bandwidth of gloo : [\d.e-]+$", text, re.M)


def test_far_percentiles_and_load_are_marked() -> None:
    good = times([[400e-6]] * 2, [[50e-6]] * 2)
    line = table.lines([good, good])[0]
    assert table.row(line).split()[-1] == "20.0"  # the share of the limit, without a mark
    far = dataclasses.replace(line, p99_us=200.0, loaded=True)
    assert table.row(far).split()[-1] == "!*"
    assert "above 3 times the time" in table.foot([line, far])[-2]
    assert "the load was above the number of processors" in table.foot([line, far])[-1]
    assert len(table.foot([line])) == 2
    assert table.row(line, checked=False).count("N/A") == 5  # one form, and 4 columns without one


def calls(group: pycomm.Group) -> None:
    x = np.ones(4096, np.float32)
    for _ in range(10):
        pycomm.all_reduce(x, "max", group=group)
        pycomm.reduce(x, 1, group=group)
        pycomm.broadcast(x, 1, group=group)
        pycomm.all_gather(x, group=group)
        pycomm.gather(x, 1, group=group)
        pycomm.reduce_scatter(x.reshape(2, -1), group=group)
        pycomm.scatter(x.reshape(2, -1), 1, group=group)
        pycomm.all_to_all(x.reshape(2, -1), group=group)
        received = pycomm.recv(x.copy(), 1 - group.rank, 3, group=group, async_op=True)
        pycomm.send(x, 1 - group.rank, 3, group=group)
        received.wait()
        pycomm.barrier(group=group)


def test_a_trace_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PYCOMM_TRACE", str(tmp_path / "traces"))
        run_ranks(2, calls, transport="shm", processes=True)
        patch.setenv("PYCOMM_TRACE", str(tmp_path / "again"))
        content = stored(tmp_path, f"collectives --replay {tmp_path / 'traces'} --rounds 2")
    found = {row["call"]: row["calls"] for row in content["rows"]}
    assert found == {
        **{"all_reduce(float32, 4,096, max)": 20, "reduce(float32, 4,096, sum, root 1)": 20},
        **{"broadcast(float32, 4,096, root 1)": 20, "all_gather(float32, 4,096)": 20},
        **{"gather(float32, 4,096, root 1)": 20, "reduce_scatter(float32, 2,048, sum)": 20},
        **{"scatter(float32, 2,048, root 1)": 20, "all_to_all(float32, 2,048)": 20},
        **{f"recv(float32, 4,096, from rank {i}, tag 3)": 10 for i in range(2)},
        **{f"send(float32, 4,096, to rank {i}, tag 3)": 10 for i in range(2)},
        "barrier()": 22,  # and one at each end
    }
    assert all(row["recorded_us"] > 0 < row["replayed_us"] for row in content["rows"])
    again: Counter[str] = Counter()  # the calls of the replay, of which the first is not timed
    for path in (tmp_path / "again").glob("*.trace"):
        again.update(map(flight_recorder.title, flight_recorder.read(path).records))
    found.pop("barrier()")
    assert {call: again[call] for call in found} == {call: 3 * n for call, n in found.items()}
    title = r'# group "world" of .*: 2 ranks, 111 calls, replayed 2 times in'
    assert re.search(title, capfd.readouterr().out)
    (tmp_path / "traces" / "world.1.trace").unlink()
    with pytest.raises(SystemExit):
        bench.main(["collectives", "--replay", str(tmp_path / "traces")])
    assert "has 2 ranks and traces of 1" in capfd.readouterr().err


def test_each_mpi_has_its_own_run() -> None:
    peers = [Peer(name, name) for name in ("pycomm", "mpich", "openmpi", "gloo")]
    run = cases.Run(2, [], peers, 1)
    assert run.mpis == ["mpich", "openmpi"]
    assert [peer.name for peer in run.beside("openmpi")] == ["pycomm", "openmpi", "gloo"]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("verb", "dtype"), [("all_gather", "float32"), ("all_reduce", "int32")])
def test_operators_of_other_libraries_reduce_floats_alone(name: str, verb: str, dtype: str) -> None:
    """DeepSpeed would leave integers as they are, and the run would measure nothing."""
    arrays = verbs.Arrays(cases.Case(verb, dtype, 64, 2), rank=0)
    groups = Groups.__new__(Groups)  # needs no processes: the call is refused before
    with pytest.raises(NotImplementedError, match=f"{name}: only all_reduce"):
        groups.call(PEERS[name], arrays)


@pytest.mark.usefixtures("any_speed")
def test_bursts_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = "bursts --idle 0.001 --rounds 2 --sizes 4K --peers pycomm-direct,gloo"
    rows = stored(tmp_path, words)["rows"]
    found = [(row["peer"], row["buffers"]) for row in rows]
    peers = "pycomm-direct", "gloo", "copy"
    assert found == [(peer, buffers) for peer in peers for buffers in (4, 1)]
    assert all(row["bursts"] == 2 and row["bound_us"] > 0 for row in rows)
    assert "bound_us" in capfd.readouterr().out


def test_pauses_run(tmp_path: Path) -> None:
    rows = stored(tmp_path, "pauses --ranks 2 --rounds 3 --idle 0.001")["rows"]
    found = [(row["call"], row["backend"]) for row in rows]
    assert found == [(call, name) for call in pauses.CALLS for name in pauses.BACKENDS]
    assert all(0 < row["median_us"] <= row["p99_us"] for row in rows)
    assert all(row["ratio"] == row["p99_ratio"] == 1 for row in rows[::3])


def test_a_pause_is_compared_with_gloos_by_median_and_percentile() -> None:
    figures = pauses.figures([*range(100, 200)], [200.0] * 100)
    assert figures == {"median_us": 149.5, "p99_us": 198, "ratio": 0.7475, "p99_ratio": 0.99}


def test_single_copies_run(tmp_path: Path) -> None:
    rows = stored(tmp_path, "single_copy --sizes 4K,1M --rounds 2")["rows"]
    ways = ["slots", "read", "write", "both"]
    expected = [("broadcast", way) for way in ways] + [("all_gather", way) for way in ways[:2]]
    assert [(row["call"], row["way"]) for row in rows] == 2 * expected
    assert all(0 < row["median_us"] <= row["worst_us"] for row in rows)


def test_forming_runs(tmp_path: Path) -> None:
    rows = stored(tmp_path, "forming --ranks 2 --groups 2 --many 3")["rows"]
    assert [(row["ranks"], row["backend"]) for row in rows] == [(2, "gloo"), (2, "pycomm")]
    kinds = ("first", "later", "many", "all_reduce")
    assert all(0 < row[f"{kind}_ms"] <= row[f"{kind}_worst_ms"] for row in rows for kind in kinds)
    theirs, ours = (row["descriptors"] for row in rows)
    assert ours < theirs


PREFIX = "--peers mpich --mpi-prefix mpich"
INVALID = ["--peers smoke", "--peers intelmpi", "--sizes x", "--ranks 1", PREFIX, f"{PREFIX}=/no"]
INVALID += ["--idle 1", *(f"--peers {name}" for name in OPERATORS)]  # not installed, as intelmpi


@pytest.mark.parametrize("words", INVALID)
def test_invalid_options_are_rejected(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        collectives.main(words.split())
    assert "bench collectives: error" in capsys.readouterr().err


# ---- links ---------------------------------------------------------------------------------------


def link_reports(seconds: dict[str, float], cpu_s: float) -> link_rank.RankTimes:
    return link_rank.RankTimes(
        verb="all_reduce",
        size_bytes=10**8,
        wrong=dict.fromkeys(seconds, 1),
        seconds={name: [[s, s, 9.0]] for name, s in seconds.items()},
        cpu_s={name: [[cpu_s]] for name in seconds},
    )


def test_link_results_count_the_bytes_that_a_host_must_send() -> None:
    by_rank = [link_reports({"pycomm": 0.1, "gloo": 0.2}, c) for c in (0.03, 0.05)]
    by_rank += [link_reports({"pycomm": 0.2, "gloo": 0.5}, 0.04), by_rank[0]]
    ours, gloo = links.rows_of("4gbit", 2, by_rank)  # two ranks on each of two hosts
    assert (ours.wrong, gloo.ratio, ours.time_ms) == (4, 1, 200)
    assert ours.ratio == pytest.approx(2.5)
    assert (ours.bandwidth_gbs, ours.line_percent) == (pytest.approx(0.5), pytest.approx(100))
    assert ours.cpu_s_per_gb == pytest.approx((0.03 + 0.05 + 0.04 + 0.03) / 2 / 0.1)
    assert links.rows_of("none", 2, by_rank)[0].line_percent is None
    assert links.rows_of("none", 4, by_rank)[0].bandwidth_gbs == pytest.approx(0.75)


@NEEDS_HOSTS
def test_links_run(tmp_path: Path) -> None:
    words = "links --rates 1gbit --sizes 64K --rounds 1 --hosts 3 --peers pycomm,gloo,sockets"
    rows = stored(tmp_path, words, plot=True)["rows"]
    assert [row["peer"] for row in rows] == ["pycomm", "gloo", "sockets"]
    assert all(row["rate"] == "1gbit" and row["wrong"] == 0 < row["time_ms"] for row in rows)
    assert all(row["cpu_s_per_gb"] > 0 for row in rows)


def test_missing_network_namespaces_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert links.main([]) == 2
    with pytest.raises(SystemExit):
        training.main(["--rates", "1gbit"])
    assert capsys.readouterr().err.count("needs root") == 2
