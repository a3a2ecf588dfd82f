"""The workflows of .github run targets of the Makefile, so that they can be tried on any machine.

tools/lint.py holds them against the schema of GitHub's workflows.
"""

import json
import re

from paths import ROOT

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
