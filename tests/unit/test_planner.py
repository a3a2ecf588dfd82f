"""Predicted times of a step on other hardware, compared with measurements between hosts."""

import json
from pathlib import Path

import pytest
import torch
from paths import ROOT
from torch import nn

import pycomm
from pycomm.__main__ import main
from pycomm.bench.support import summaries
from pycomm.compress.cost_model import Coding
from pycomm.compress.schedule import Load
from pycomm.errors import InvalidArgument
from pycomm.tuning import planner
from pycomm.tuning.planner import Expected, best, expected

RESULTS = ROOT / "benchmarks" / "results"
GBIT = {"100mbit": 0.1, "1gbit": 1.0, "10gbit": 10.0}
MEASURED = {"dense": "dense", "dgc gather": "dgc", "dgc 2bit gather": "compact", "local 8": "local"}


def coding() -> Coding:
    """Of raw packets, from the stored results of the kernels on the same kind of machine."""
    rows = summaries.read(RESULTS / "kernels.json")["rows"]
    largest = max(row["count"] for row in rows)
    took = {
        row["kernel"]: row["time_ms"] / 1e3 / row["count"]
        for row in rows
        if row["count"] == largest and row["peer"] == "pycomm"
    }
    return Coding(took["dgc_step"], took["topk"], encode=0.0, decode=0.0, add=0.0)


def test_estimate_is_within_a_fifth_of_the_measurement() -> None:
    """`bench links --training`: 41 M elements, 2 hosts, 0.1 to 10 Gbit/s."""
    stored = summaries.read(RESULTS / "links_training.json")
    count = stored["settings"]["elements"]
    load = Load([count // 1000], [count], 4, None)
    compact = Load([count // 1000], [count], 4, "2bit")
    for rate, gbit in GBIT.items():
        rows = {row["way"]: row["step_s"] for row in stored["rows"] if row["rate"] == rate}
        found = expected(rows["compute"], (load, compact), (coding(), coding()), (2, gbit))
        for name, way in MEASURED.items():
            assert found[name] == pytest.approx(rows[way], rel=0.2), (rate, name)


def test_more_ranks_and_slower_links() -> None:
    """A gather grows with the ranks, a sharded exchange does not; fewer bytes matter on a slow
    link, and not on one without cost."""
    load, compact = (Load([41_000], [41_000_000], 4, code) for code in (None, "2bit"))
    one = Coding(1e-9, 1e-10, 1e-8, 1e-8, 1e-9)

    def at(ranks: int, gbit: float) -> Expected:
        return Expected(ranks, gbit, expected(0.1, (load, compact), (one, one), (ranks, gbit)))

    few, many = at(8, 1.0).seconds, at(4096, 1.0).seconds
    assert many["dgc gather"] > 10 * few["dgc gather"]
    assert many["dgc 2bit sharded"] < 2 * few["dgc 2bit sharded"]
    assert best(at(4096, 1.0)) == "dgc 2bit sharded"
    assert best(at(2, 1e6)) == "-"
    assert few["bf16"] < few["dense"]
    read = 4088 * 41_000 * (one.decode + one.add)  # of the packets of all other ranks
    longer = at(4096, 1e6).seconds["dgc gather"] - at(8, 1e6).seconds["dgc gather"]
    assert longer == pytest.approx(read, rel=0.01)


def test_the_call_measures_a_step() -> None:
    layer = nn.Linear(64, 64)
    calls = []

    def step() -> None:
        calls.append(layer(torch.ones(1, 64)).sum().backward())

    found = pycomm.plan(layer, step, ranks=[2, 4], gbit=[1.0])
    assert len(calls) == planner.WARM + planner.STEPS
    assert [(one.ranks, one.gbit) for one in found] == [(2, 1.0), (4, 1.0)]
    with pytest.raises(InvalidArgument, match="at least 2 ranks"):
        pycomm.plan(layer, step, ranks=[1])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--width", "32", "--layers", "2", "--rows", "4", "--ranks", "2,1024"]
    stored = tmp_path / "plan.json"
    assert main([*arguments, "--gbit", "1,100", "--json", str(stored)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all(line.endswith("x") for line in lines[1:])
    content = json.loads(stored.read_text())
    assert [(one["ranks"], one["gbit"]) for one in content] == [
        (n, r) for r in (1, 100) for n in (2, 1024)
    ]
    assert f"{content[0]['seconds']['dense']:.4f}" in lines[1]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--ranks", value) for value in ("abc", "1", "", str(2**31))),
        *(("--gbit", "0"), ("--gbit", "nan"), ("--width", "0"), ("--layers", "x")),
        ("--rows", "1,2"),
    ],
)
def test_invalid_numbers_are_one_line(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["plan", f"{option}={value}"])
    assert raised.value.code == 2
    assert f"argument {option}: got '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--width", "2000000"], "layers of 2000000 x 2000000 and 64 rows need"),
        (["--width", "8", "--json", "/nowhere/plan.json"], "No such file or directory"),
    ],
)
def test_impossible_input_is_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *options]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("pycomm plan: ")
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("seconds", "advice"),
    [
        ({"dense": 1.01, "bf16": 0.5, "dgc gather": 1.0, "local 8": 1.0}, "-"),
        ({"dense": 1.03, "bf16": 0.5, "dgc gather": 1.01, "local 8": 1.0}, "dgc gather"),
        ({"dense": 1.0, "bf16": 0.5, "dgc gather": 1.03, "local 8": 1.1}, "dense"),
    ],
)
def test_no_advice_where_dense_gradients_take_as_long(
    seconds: dict[str, float], advice: str
) -> None:
    assert best(Expected(2, 1.0, seconds)) == advice
