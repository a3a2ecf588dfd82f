"""`pycomm bench connection_flood`: it runs and stores, and broken promises are reported."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.reliability import connection_flood
from benchmarks.reliability.connection_flood import Flood
from pycomm.bench.support import summaries

KEPT = Flood("pycomm", 900, 100, 0.1, 0.1, 1000.0, 990.0, 20, 20)


@pytest.mark.no_attack("descriptors of its ranks are counted, and it makes such calls itself")
def test_the_command_runs_and_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "flood.json"
    monkeypatch.setattr(connection_flood, "STEPS", 300)
    monkeypatch.setattr(connection_flood, "JOBS", 2)
    chosen = ["--peers", "pycomm", "--connections", "1000", "--json", str(path)]
    connection_flood.main(chosen)  # its exit status includes the speed, on a shared machine
    (flood,) = summaries.read(path)["flood"]
    assert (flood["error"], flood["let_in"]) == ("", 0)
    assert flood["connected"] >= 100, "clients connect while the group forms"
    assert flood["refused"] >= 100, "clients are refused once the store's public port is closed"
    assert flood["descriptors"] <= flood["descriptors_quiet"]
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
