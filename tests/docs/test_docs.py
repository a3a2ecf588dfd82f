"""Every Python block in README and docs runs; every linked file exists."""

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

ELSEWHERE = ["README", "CONTRIBUTING", "CHANGELOG", "SECURITY"]
ELSEWHERE += ["examples/README", "benchmarks/RESULTS"]
PAGES = [ROOT / f"{name}.md" for name in ELSEWHERE] + sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 100  # of a block
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def blocks() -> list:
    """One parameter for each block, with its page and line as the id."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            found.append(pytest.param(match[1], id=f"{page.name}:{line}"))
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


@pytest.mark.parametrize("code", blocks())
def test_block_runs(code, tmp_path):
    (tmp_path / "block.py").write_text(code)
    process = multiprocessing.get_context("spawn").Process(target=run_as_script, args=(tmp_path,))
    process.start()
    process.join(LIMIT_S)
    process.kill()
    process.join()
    assert process.exitcode == 0, (tmp_path / "output").read_text()


@pytest.mark.parametrize("number", range(3))
def test_each_of_the_three_uses_runs_on_two_processes(number, tmp_path):
    _, _, uses = (ROOT / "README.md").read_text().partition("## Three uses")
    code = BLOCK.findall(uses)[number]
    assert len([line for line in code.splitlines() if line]) <= 12
    (tmp_path / "program.py").write_text(code)
    launch = [sys.executable, "-m", "pycomm", "launch", "--nproc", "2", "program.py"]
    done = subprocess.run(
        launch, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_existing_targets(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} points at {target}"


def test_generated_tables_match_the_stored_results():
    command = [sys.executable, str(ROOT / "tools" / "tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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
