"""`pycomm bench connection_flood`: it runs and stores, and broken promises are reported."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.reliability import connection_flood, delayed_flood
from benchmarks.reliability.connection_flood import Cycles, Flood
from benchmarks.reliability.delayed_flood import DelayedFlood
from pycomm.bench.support import delayed_link, summaries

HELD = {"descriptors": 20, "threads": 3, "mappings": 100}
KEPT = Flood("pycomm", 900, 100, 0.1, 0.1, 1000.0, 990.0, 20, 20)
CLEAN = Cycles("pycomm", 10, [], HELD, HELD)
FAR = DelayedFlood("mesh", 10, 8000, quiet_s=[0.2, 0.3, 9.0], flooded_s=[0.4, 2.2])


@pytest.mark.no_attack("descriptors of its ranks are counted, and it makes such calls itself")
def test_the_command_runs_and_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "flood.json"
    monkeypatch.setattr(connection_flood, "STEPS", 300)
    chosen = ["--peers", "pycomm", "--connections", "1000", "--cycles", "24"]
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


@pytest.mark.skipif(bool(delayed_link.missing()), reason=delayed_link.missing() or "it is there")
@pytest.mark.parametrize("where", delayed_flood.FORMING)
def test_a_distant_rank_joins_beside_a_flood(where: str) -> None:
    """The benchmark checks the time: here the machine may be busy."""
    found = DelayedFlood(where, 50, 500)
    for flooded in (False, True):
        delayed_flood._form(found, flooded)
    assert min(*found.quiet_s, *found.flooded_s) > 2 * 0.05, "packets were not delayed"
    assert found.reached_per_s[0] > 0


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (KEPT, True),
        (replace(KEPT, error="PeerLost"), False),
        (replace(KEPT, descriptors=21), False),
        (replace(KEPT, let_in=1), False),
        (replace(KEPT, steps_per_s=899.0), False),
        (replace(KEPT, backend="gloo", error="it hangs"), True),  # its promises are not pycomm's
        (CLEAN, True),
        (replace(CLEAN, failures=["cycle 3: rank 0 hangs"]), False),
        (replace(CLEAN, files=1), False),
        (replace(CLEAN, last={**HELD, "descriptors": 21}), False),
        (replace(CLEAN, last={**HELD, "threads": 4}), False),
        (FAR, True),
        (replace(FAR, flooded_s=[0.4, 2.4]), False),
        (replace(FAR, error="PeerLost"), False),
        (replace(FAR, flooded_s=[]), False),
    ],
)
def test_harmful_flood_is_detected(found: Flood | Cycles | DelayedFlood, kept: bool) -> None:
    assert found.kept() == kept
