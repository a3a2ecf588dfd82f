"""The workflows of .github run targets of the Makefile, so that they can be tried on any machine.

tools/lint.py holds them against the schema of GitHub's workflows.
"""

import re

from paths import ROOT


def test_every_command_is_a_make_target() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    commands = [
        command
        for file in files
        for command in re.findall(r"^ *-? *run: (.*)$", file.read_text(), re.MULTILINE)
    ]
    assert len(files) == 3
    assert len(commands) >= 2
    for command in commands:
        assert re.fullmatch(r"make ([\w-]+)", command), command
        assert command.removeprefix("make ") in targets
