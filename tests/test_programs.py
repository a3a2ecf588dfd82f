"""Other people's programs on the backend "pycomm", where their packages are installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "peers" / "programs.py"
NEEDS = {
    "accelerate_script": "accelerate",
    "accelerate_sync": "accelerate",
    "lightning": "lightning",
    "trainer": "transformers",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", NEEDS)
def test_runs_unchanged(program: str) -> None:
    if importlib.util.find_spec(NEEDS[program]) is None:
        pytest.skip(f"needs the package {NEEDS[program]}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(SCRIPT), program, "pycomm"]
    found = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": found, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count(f"{program} on pycomm: done") == 2, done.stdout[-2000:]
