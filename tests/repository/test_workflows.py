"""The workflows of .github run targets of the Makefile, so that they can be tried on any machine.

tools/lint.py holds them against the schema of GitHub's workflows.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from finished import finished
from paths import ROOT

from tools import test_alone
from tools.torch_headers import VERSIONS

WORKFLOWS = ROOT / ".github" / "workflows"


def test_every_command_is_a_make_target() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    files = sorted(WORKFLOWS.glob("*.yml"))
    commands = [
        command
        for file in files
        for command in re.findall(r"^ *-? *run: (.*)$", file.read_text(), re.MULTILINE)
    ]
    assert len(files) == 4
    assert len(commands) >= 4
    for command in commands:
        assert re.fullmatch(r"make ([\w-]+)", command), command
        assert command.removeprefix("make ") in targets


def test_each_supported_torch_is_tested_every_night() -> None:
    (line,) = re.findall(
        r"^ +torch: (\[.*\])$", (WORKFLOWS / "nightly.yml").read_text(), re.MULTILINE
    )
    assert json.loads(line) == list(VERSIONS)


def test_each_part_of_a_night_is_a_job() -> None:
    (line,) = re.findall(r"^PARTS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = (WORKFLOWS / "nightly.yml").read_text()
    listed = re.findall(r"^ {10}- ([\w-]+)$", text, re.MULTILINE)
    alone = re.findall(r"^ +PART: ([\w-]+)$", text, re.MULTILINE)
    assert sorted(listed + alone) == sorted(line.split())


def test_an_unknown_part_is_rejected() -> None:
    done = finished(["make", "--dry-run", "nightly", "PART=clean"], cwd=ROOT)
    assert done.returncode != 0
    assert "invalid PART: got clean, expected one of tests" in done.stderr


def test_parts_of_test_alone_have_each_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Path] = []
    monkeypatch.setattr(test_alone, "run", lambda path: ran.append(path) or True)
    for part in test_alone.PARTS[1:]:
        monkeypatch.setattr(sys, "argv", ["test_alone.py", "--part", part])
        assert test_alone.main() == 0
    assert sorted(ran) == sorted((ROOT / "tests").rglob("test_*.py"))
