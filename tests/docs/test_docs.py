"""The pages: every Python block runs and prints the output that is shown behind it, every command
is valid, every name, file and link exists.
"""

import multiprocessing
import os
import re
import runpy
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from finished import finished
from paths import ROOT

ELSEWHERE = ["README", "CONTRIBUTING", "CHANGELOG", "SECURITY"]
ELSEWHERE += ["examples/README", "benchmarks/RESULTS"]
PAGES = [ROOT / f"{name}.md" for name in ELSEWHERE] + sorted((ROOT / "docs").rglob("*.md"))
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# A program of several ranks says how it is started: its first words are those of the launcher.
LAUNCHED = re.compile(r"with (pycomm launch --nproc .*)$", re.MULTILINE)
NOT_RUN = {"ProcessGroupWrapper": "needs torchft: tests/compat/torchft_tests.py runs this block"}
OUTPUT = re.compile(r"\n\n```output\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 100  # of a block
LINK = re.compile(r"(?:\]\(|^\[[\w-]+\]: )(?!https?:)([^)#\s]*)(?:#([\w-]+))?", re.MULTILINE)


def blocks() -> list:
    """One parameter for each Python block, also one in a list: the code and the output that is
    shown behind it, with its page and line as the id."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCED.finditer(text):
            line = text[: match.start()].count("\n") + 1
            if match[2].startswith("py") and not any(word in match[3] for word in NOT_RUN):
                shown = OUTPUT.match(text, match.end())
                output = shown[1] if shown else ""
                found.append(pytest.param(dedent(match[3]), output, id=f"{page.name}:{line}"))
    return found


def run_as_script(folder: Path) -> None:
    """The program block.py of the folder, as `python block.py` runs it; its output in a file."""
    with (folder / "output").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)
    sys.argv, sys.path[0] = [str(folder / "block.py")], str(folder)
    runpy.run_path(str(folder / "block.py"), run_name="__main__")


def run_launched(command: str, folder: Path) -> str:
    """What the program block.py of the folder prints, by `pycomm launch` with options."""
    words = [sys.executable, "-m", *command.split(), "block.py"]
    done = finished(words, cwd=folder, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


def same_on_each_run(text: str) -> list[str]:
    """The lines without numbers and names of hosts."""
    return re.sub(r"[\d.,]*\d|(?<=host )\S+(?=,)", "0", text).splitlines()


def run_alone(folder: Path) -> str:
    """What the program block.py of the folder prints in a process of its own."""
    process = multiprocessing.get_context("spawn").Process(target=run_as_script, args=(folder,))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join()
    printed = (folder / "output").read_text()
    assert process.exitcode == 0, printed
    return printed


@pytest.mark.parametrize(("code", "output"), blocks())
def test_block_runs(code, output, tmp_path):
    (tmp_path / "block.py").write_text(code)
    if launched := LAUNCHED.search(code):
        printed = run_launched(launched[1], tmp_path)
    else:
        printed = run_alone(tmp_path)
    assert set(same_on_each_run(output)) - set(same_on_each_run(printed)) == set(), printed


def test_readme_shows_three_uses_of_few_lines():
    found = [block.values for block in blocks() if block.id.startswith("README")]
    lengths = [len(re.findall(r"\S.*", code)) for code, output in found if output]
    assert len(lengths) == 3
    assert max(lengths) <= 8


def anchor_of(heading: str) -> str:
    """As GitHub and Sphinx make it."""
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {anchor_of(head) for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_existing_targets(page):
    for file, anchor in LINK.findall(FENCED.sub("", page.read_text())):
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name} points at {file}"
        assert not anchor or anchor in anchors(target), f"{page.name} points at {file}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    folders = "csrc|pycomm|tests|tools|benchmarks|examples"
    named = re.findall(rf"`((?:{folders})/[\w./*-]+|docs/[\w./-]+\.md)`", page.read_text())
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


def test_every_guarantee_names_existing_tests():
    page = (ROOT / "docs" / "internals" / "guarantees.md").read_text()
    _, _, rest = page.partition("## Tests by guarantee")
    table = rest.partition("## ")[0]
    rows = [line for line in table.splitlines() if re.match(r"\| (?!guarantee )", line)]
    assert len(rows) > 20
    assert [line for line in rows if not re.search(r"`test_\w+`", line)] == []
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert set(re.findall(r"`(test_\w+)`", table)) - set(re.findall(r"def (\w+)", sources)) == set()
    suites = {
        name
        for row in re.findall(r"suites? (`[^|;]*`)", table)
        for name in re.findall(r"`(\w+)`", row)
    }
    there = {path.stem.removesuffix("_test") for path in (ROOT / "tests" / "native").glob("*.cpp")}
    assert suites
    assert suites - there == set()
