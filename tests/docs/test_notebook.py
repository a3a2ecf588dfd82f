"""The notebook of the tutorial has the code of its page, and runs without a file."""

import json
import sys

from finished import finished
from paths import ROOT
from test_docs import blocks

CELLS = json.loads((ROOT / "docs" / "tutorial" / "slow_link.ipynb").read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
LAUNCHED = """
import pycomm
@pycomm.launcher(nproc=2)
def train(): ...
try:
    train()
except pycomm.errors.InvalidArgument as error:
    print(error)
"""


def test_notebook_runs_and_its_launcher_names_run_ranks() -> None:
    """As Jupyter runs cells: the module __main__ has no file."""
    (page,) = (code for code, *_ in (b.values for b in blocks()) if code.startswith(CODE[0]))
    assert "\n\n\n".join(CODE) == page.rstrip("\n")
    done = finished([sys.executable, "-c", "\n\n".join([*CODE, LAUNCHED])], timeout=100)
    assert done.returncode == 0, done.stderr
    *times, error = done.stdout.splitlines()
    assert [line.split(":")[0] for line in times] == ["dense", "Quantize", "TopK"]
    assert "In a notebook, pycomm.testing.run_ranks(2, function)" in error
