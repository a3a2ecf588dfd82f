"""Every example is short, is listed in examples/README.md and runs as its docstring states."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

PAGE = ROOT / "examples" / "README.md"
STARTERS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "pycomm": ["-m", "pycomm"],
    "python": [],
}
COMMAND = re.compile(
    r"^ *((?:torchrun|pycomm launch|python) .*examples/\w+\.py)(.*)$", re.MULTILINE
)


def lines() -> list[str]:
    """The command lines of all examples, one for each of the words in brackets."""
    found = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        match = COMMAND.search(path.read_text())
        assert match, f"{path.name} has no command line"
        arguments = match[2].strip(" []").split(" | ")
        found += [f"{match[1]} {word}".strip() for word in arguments]
    return found


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command line in a folder, with this Python."""
    starter, *arguments = shlex.split(line)
    arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in arguments]
    return subprocess.run(
        [sys.executable, *STARTERS[starter], *arguments],
        cwd=folder, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip


def printed(done: subprocess.CompletedProcess[str]) -> str:
    """The output of the program, without the launcher's tables."""
    _, _, after = done.stdout.rpartition("-+\n")
    return after


@pytest.mark.parametrize("line", lines())
def test_example_runs(line: str, tmp_path: Path) -> None:
    done = run(line, tmp_path)
    assert done.returncode == 0, done.stderr
    assert printed(done)
    name = COMMAND.search(line)[1].rpartition("/")[2]
    row = next(r for r in PAGE.read_text().splitlines() if f"[{name}]({name})" in r)
    assert f"`{COMMAND.search(line)[1]}" in row


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100
