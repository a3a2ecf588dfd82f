"""`pycomm bench connection_flood`: it runs and stores, and broken promises are reported."""

import multiprocessing
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import pytest

from benchmarks.reliability import connection_flood, delayed_flood
from benchmarks.reliability.connection_flood import Cycles, Flood
from benchmarks.reliability.connection_flood_rank import Held
from benchmarks.reliability.delayed_flood import DelayedFlood
from pycomm.bench.support import summaries

KEPT = Flood("pycomm", 900, 100, 0.1, 0.1, 1000.0, 990.0, 20, 20)
CLEAN = Cycles("pycomm", 10, [], Held(20, 3, 100), Held(20, 3, 100))


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    """The server that multiprocessing keeps permanently, with the modules that the command
    preloads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.reliability.connection_flood_rank"])
    forkserver.ensure_running()


@pytest.mark.no_attack("descriptors of its ranks are counted, and it makes such calls itself")
def test_the_command_runs_and_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flood.json"
    chosen = ["--peers", "pycomm", "--connections", "200", "--cycles", "24"]
    chosen += ["--rounds", "0", "--json", str(path)]
    connection_flood.main(chosen)  # its exit status includes the speed, on a shared machine
    stored = summaries.read(path)
    (flood,), (cycles,) = stored["flood"], stored["cycles"]
    assert flood["error"] == ""
    assert flood["connected"] >= 100, "clients connect while the group forms"
    assert flood["refused"] >= 100, "clients are refused once the store's public port is closed"
    assert flood["descriptors"] <= flood["descriptors_quiet"]
    assert min(flood["forming_s"], flood["steps_per_s"]) > 0
    assert (cycles["cycles"], cycles["failures"], cycles["files"]) == (24, [], 0)
    assert cycles["last"]["descriptors"] == cycles["first"]["descriptors"]
    shown = capsys.readouterr().out
    assert "clients" in shown
    assert "failures" in shown


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
    assert connection_flood._kept(found) == kept


@pytest.mark.parametrize(
    ("found", "clean"),
    [
        (CLEAN, True),
        (replace(CLEAN, failures=["cycle 3: rank 0 hangs"]), False),
        (replace(CLEAN, files=1), False),
        (replace(CLEAN, last=Held(21, 3, 100)), False),
        (replace(CLEAN, last=Held(20, 4, 100)), False),
    ],
)
def test_leaking_cycle_is_detected(found: Cycles, clean: bool) -> None:
    assert connection_flood._clean(found) == clean


@pytest.mark.skipif(bool(delayed_flood.missing()), reason=delayed_flood.missing() or "it is there")
@pytest.mark.parametrize("where", delayed_flood.FORMING)
def test_a_distant_rank_joins_beside_a_flood(where: str) -> None:
    """The benchmark checks the time: here the machine may be busy."""
    found = DelayedFlood(where, 50, 500)
    delayed_flood._form(found)
    assert min(*found.quiet_s, *found.flooded_s) > 2 * 0.05, "packets were not delayed"
    assert found.reached_per_s[0] > 0


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (DelayedFlood("mesh", 10, 8000, quiet_s=[0.2, 0.3, 9.0], flooded_s=[0.4, 2.2]), True),
        (DelayedFlood("mesh", 10, 8000, quiet_s=[0.2, 0.3, 9.0], flooded_s=[0.4, 2.4]), False),
        (DelayedFlood("mesh", 10, 8000, quiet_s=[0.2], flooded_s=[0.4], error="PeerLost"), False),
        (DelayedFlood("mesh", 10, 8000, quiet_s=[0.2]), False),
    ],
)
def test_flood_that_delays_distant_ranks_is_detected(found: DelayedFlood, kept: bool) -> None:
    assert found.kept() == kept
