"""docs/internals/acceptance.md: the spellings that its rows give are valid, the tests exist."""

import ast
import inspect
import re
import subprocess
import sys
from functools import cache

import pytest
from paths import ROOT
from test_rows import complaint, target

from pycomm import config

PAGE = ROOT / "docs" / "internals" / "acceptance.md"
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| [PMCTG]\d", line)
]


@cache
def help_of(command: str) -> str:
    """What `pycomm COMMAND --help` prints."""
    words = [sys.executable, "-m", "pycomm", *command.split(), "--help"]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=100).stdout


def check_call(text: str) -> None:
    """The function exists and accepts these arguments; it is not called."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert target(call.func) is not None, text
    assert complaint(call) == "", text


def check_command(text: str) -> None:
    """The command exists and has these options."""
    words = text.split()
    options = [word for word in words if word.startswith("--")]
    shown = help_of(" ".join(words[1 : len(words) - len(options)]))
    assert [option for option in options if not re.search(rf"{option}\b", shown)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_spellings_are_valid(row: list[str]) -> None:
    _, _, ours, _ = row
    for text in re.findall(r"`([^`]+)`", ours):
        if text.startswith("pycomm."):
            check_call(text)
        elif text.startswith("pycomm "):
            check_command(text)
        elif text.startswith("PYCOMM_"):
            assert text.partition("=")[0] in inspect.getsource(config)
        else:
            assert text in ("torch.compile", "python -m pycomm.launch")
    for file in re.findall(r"examples/\w+\.py", ours):
        assert (ROOT / file).exists()


def test_each_row_that_applies_names_existing_tests() -> None:
    assert [int(row[0][1:]) for row in ROWS] == list(range(1, 84))
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"def (test_\w+)", sources))
    for number, _, ours, tests in ROWS:
        named = re.findall(r"`(test_\w+)`", tests)
        assert named or ours.startswith("none"), number
        assert set(named) - there == set(), number
