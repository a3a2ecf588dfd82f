"""Every example is short and runs as its first lines say; docs/examples.md shows what it prints.

`python tests/test_examples.py` runs them and writes that page anew.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "examples.md"
STARTERS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "pycomm": ["-m", "pycomm"],
    "python": [],
}
COMMAND = re.compile(
    r"^ *((?:torchrun|pycomm launch|python) .*examples/\w+\.py)(.*)$", re.MULTILINE
)
# Timings, and what differs from machine to machine.
NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


def lines() -> list[str]:
    """The command lines of all examples, one for each of the words in brackets."""
    found = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        match = COMMAND.search(path.read_text())
        assert match, f"{path.name} does not say how it is started"
        words = match[2].strip(" []").split(" | ")
        found += [f"{match[1]} {word}".strip() for word in words]
    return found


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a line does in a folder, with this Python."""
    starter, *words = shlex.split(line)
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    return subprocess.run(
        [sys.executable, *STARTERS[starter], *words],
        cwd=folder, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip


def printed(done: subprocess.CompletedProcess[str]) -> str:
    """What the program wrote, without the launcher's tables."""
    _, _, after = done.stdout.rpartition("-+\n")
    return after


def block(line: str, output: str) -> str:
    return f"```text\n$ {line}\n{output}```\n"


@pytest.mark.parametrize("line", lines())
def test_example_runs(line: str, tmp_path: Path) -> None:
    done = run(line, tmp_path)
    assert done.returncode == 0, done.stderr
    assert printed(done)
    shown = NUMBER.sub("#", block(line, printed(done)))
    assert shown in NUMBER.sub("#", PAGE.read_text()), "python tests/test_examples.py"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100


def write_page() -> None:
    """Runs all of them."""
    text = "# Examples\n\nWhole programs, with what they print on two processes of one machine.\n"
    for line in lines():
        with tempfile.TemporaryDirectory() as folder:
            done = run(line, Path(folder))
        assert done.returncode == 0, done.stderr
        name = COMMAND.search(line)[1].rpartition("/")[2]
        heading = f"\n## [{name}](../examples/{name})\n"
        if heading not in text:
            first = (ROOT / "examples" / name).read_text().split('"""')[1].splitlines()[0]
            text += f"{heading}\n{first}\n"
        text += "\n" + block(line, printed(done))
    PAGE.write_text(text)


if __name__ == "__main__":
    write_page()
