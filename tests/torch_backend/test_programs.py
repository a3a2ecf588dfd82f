"""Third-party programs on the backend "pycomm", where their packages are installed.

tests/compat/programs.py runs them, with any backend.
"""

import os
import sys
from pathlib import Path

import pytest
from finished import finished
from paths import ROOT
from sample import of_the_day

from pycomm.bench.support import summaries

SCRIPT = ROOT / "tests" / "compat" / "programs.py"


@pytest.mark.timeout(1000)  # the script has 900 s
@pytest.mark.parametrize(
    "program",
    of_the_day(["accelerate_script", "accelerate_sync", "lightning", "trainer", "ray_train"], 3),
)
def test_runs_unchanged(program: str, tmp_path: Path) -> None:
    stored = tmp_path / "results.json"
    command = [sys.executable, str(SCRIPT), "--only", f"^{program}$", "--json", str(stored)]
    found = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": found}
    done = finished(command, env=env, timeout=960)
    assert stored.exists(), done.stderr[-4000:]
    result = summaries.read(stored)["programs"][program]
    if result["status"] == "left out":
        pytest.skip(result["reason"])
    assert result["status"] == "runs", result["reason"]
    assert done.returncode == 0, done.stderr[-4000:]
