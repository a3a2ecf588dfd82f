"""Commands and names in the pages: the parsers accept the first, the package has the second.

Programs that the pages show are run by test_docs.py; here nothing is started.
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from finished import finished
from paths import ROOT
from test_docs import FENCED, PAGES

from pycomm import __main__ as command_line

INLINE = re.compile(r"`([^`\n]+)`")
INDENTED = re.compile(r"^    (?! *[*`|]).*$", re.MULTILINE)
STARTS = re.compile(r"^(?:[$#] )?(?:srun )?(?:\w+=\S+ )*((?:pycomm|make|python) .*)$")
NAME = re.compile(r"(?<![\w/.-])pycomm(?:\.\w+)+(?![\w./-]*\.(?:md|py))")
NOT_THERE = {
    "pycomm._cuda": "only builds with nvcc have it",
    "pycomm._cuda.why_not": "the same",
    "pycomm.get_rank": "an example of a name that pycomm does not have",
}
FORKS = """
import os, sys, torch, pycomm  # so that each name needs no import but this
for name in sys.argv[1:]:
    if os.fork() == 0:
        try:
            eval(name)
        except BaseException as error:  # of any kind: the test shows it
            print(f"{name}: {error}", flush=True)
        os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:  # no child is left
        break
"""


def code() -> Iterator[tuple[str, str]]:
    """Each line of code in the pages that is no Python block, with the name of the page."""
    for page in PAGES:
        text = page.read_text()
        lines = [
            line
            for _, kind, block in FENCED.findall(text)
            if not kind.startswith("py")
            for line in block.splitlines()
        ]
        text = FENCED.sub("", text)
        for line in [*lines, *INLINE.findall(text), *INDENTED.findall(text)]:
            yield page.name, line.strip()


def commands() -> list[tuple[str, list[str]]]:
    """The commands of the pages: the program, and its words without comments and placeholders."""
    found = [match[1] for _, line in code() if (match := STARTS.match(line))]
    assert len(found) > 100
    split = [shlex.split(line, comments=True) for line in dict.fromkeys(found)]
    return [(first, [w for w in rest if w != "..."]) for first, *rest in split if rest]


def test_make_has_the_targets() -> None:
    made = [rest for program, rest in commands() if program == "make"]
    words = [word for rest in made for word in rest if not word.endswith("=...")]
    assert len(words) > 30
    done = finished(["make", "-n", *dict.fromkeys(words)], cwd=ROOT)
    assert done.returncode == 0, done.stderr


class Parsed(Exception):
    """The options of a command were accepted."""


def accepted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the parser of a command accepts the words. The command does not run."""
    parse = argparse.ArgumentParser.parse_args

    def only_parse(
        self: argparse.ArgumentParser, args: Any = None, namespace: Any = None
    ) -> NoReturn:
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    try:
        return command_line.main(words) == 0  # --help
    except Parsed:  # what the command would do next is not tested here
        return True
    except SystemExit as end:  # argparse refused the words, or printed its help
        return end.code == 0


def test_pycomm_has_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []
    for program, rest in commands():
        if program == "python" and rest[:2] == ["-m", "benchmarks"]:
            words = ["bench", *rest[2:]]
        elif program == "pycomm":
            words = [re.sub(r"^[NKM]$", "2", word) for word in rest]
        else:
            continue
        # A mention may lack the value of its last option, the program or the shell.
        lacking = ((), ("2",), ("2", "train.py"), ("bash",))
        completed = [[*words, *more] for more in lacking]
        if not any(accepted(some, monkeypatch) for some in completed):
            refused.append(words)
    assert refused == []


def test_names_resolve_after_import_pycomm_alone() -> None:
    guides = [page for page in PAGES if page.parent.name != "reference"]  # test_reference.py
    text = "\n".join(page.read_text() for page in guides)
    names = sorted(set(NAME.findall(text)) - set(NOT_THERE))
    assert len(names) > 50
    alone = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = finished([sys.executable, "-c", FORKS, *names], env=alone, check=True)
    assert done.stdout == ""
