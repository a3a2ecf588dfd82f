"""Third-party programs on the backend "pycomm" and in place of gloo, where their packages are
installed.

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
ON_PYCOMM = ["accelerate_script", "accelerate_sync", "lightning", "trainer", "ray_train"]
PROGRAMS = [*ON_PYCOMM, "ray_collective", "megatron_checkpoint", "vllm"]
# vLLM needs other versions of some packages: `make programs` installs it there.
WITH_VLLM = ROOT / ".venv" / "vllm" / "bin" / "python"


@pytest.mark.timeout(1000)  # the script has 900 s
@pytest.mark.parametrize("program", of_the_day(ON_PYCOMM, 5))
def test_runs_unchanged(program: str, tmp_path: Path) -> None:
    _run(program, tmp_path)


@pytest.mark.timeout(2000)  # the script runs the program twice
@pytest.mark.parametrize("program", PROGRAMS)
def test_runs_with_pycomm_in_place_of_gloo(program: str, tmp_path: Path) -> None:
    _run(program, tmp_path, "--in-place")


def _run(program: str, folder: Path, *options: str) -> None:
    stored = folder / "results.json"
    python = str(WITH_VLLM) if program == "vllm" and WITH_VLLM.exists() else sys.executable
    command = [python, str(SCRIPT), "--only", f"^{program}$", "--json", str(stored)]
    command += options
    found = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": found}
    done = finished(command, env=env, timeout=960 * (1 + len(options)))
    assert stored.exists(), done.stderr[-4000:]
    result = summaries.read(stored)["programs"][program]
    if result["status"] == "left out":
        pytest.skip(result["reason"])
    assert result["status"] == "runs", result["reason"]
    assert done.returncode == 0, done.stderr[-4000:]
