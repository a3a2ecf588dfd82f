"""Every example is short, is listed in examples/README.md, and runs and prints as its docstring
states.
"""

import ast
import re
import runpy
import secrets
import shlex
import sys
from pathlib import Path

import pytest
from finished import finished
from paths import ROOT
from sample import of_the_day

from pycomm.bench.support.netns import Network, missing

PAGE = ROOT / "examples" / "README.md"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
STARTERS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "pycomm": ["-m", "pycomm"],
    "python": [],
}
COMMAND = re.compile(
    r"^ *((?:torchrun|pycomm launch|python) .*examples/(\w+)\.py)(.*)$", re.MULTILINE
)
CHOICE = re.compile(r"\[([^]]*)\]")
NUMBER = re.compile(r"-?\d[\d.,]*(?:e[-+]?\d+)?")
WHY_NO_HOSTS = missing()


def docstring(path: Path) -> str:
    """The docstring of an example."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert text is not None, path.name
    return text


def of_several_hosts(line: str) -> bool:
    return "--nnodes" in line


def lines() -> list[str]:
    """The command lines of all examples of one host, one for each word of the first brackets. The
    word in the second ones makes a program shorter."""
    found = []
    for path in EXAMPLES:
        match = COMMAND.search(docstring(path))
        assert match, f"{path.name} has no command line"
        words, *shorter = CHOICE.findall(match[3]) or [""]
        found += [" ".join([match[1], w, *shorter]).strip() for w in words.split(" | ")]
    return [line for line in found if not of_several_hosts(line)]


def command(line: str) -> list[str]:
    """A command line, with this Python and whole paths."""
    starter, *arguments = shlex.split(line)
    arguments = [str(ROOT / word) if word.startswith("examples/") else word for word in arguments]
    return [sys.executable, *STARTERS[starter], *arguments]


def printed(output: str) -> list[str]:
    """The lines of the program, without the launcher's tables."""
    return output.rpartition("-+\n")[2].splitlines()


def promised(path: Path) -> list[str]:
    """What the docstring shows as the output: the indented lines after the command."""
    after = docstring(path).partition("examples/")[2].splitlines()[1:]
    return [line.strip() for line in after if line.startswith("    ")]


def pattern(line: str) -> str:
    """Matches a line with other numbers, with a number in place of N, and on a GPU."""
    parts = re.split(rf"{NUMBER.pattern}|\bN\b", line)
    texts = [re.escape(part).replace("cpu", "(cpu|cuda)") for part in parts]
    return NUMBER.pattern.join(text.replace(r"\ ", r"\ +") for text in texts)


def check_printed(path: Path, output: str) -> None:
    """The promised lines occur in their order."""
    rest = iter(printed(output))
    assert promised(path), f"{path.name} does not say what it prints"
    for line in promised(path):
        assert any(re.fullmatch(pattern(line), one) for one in rest), f"{line!r} in {output}"


@pytest.mark.parametrize("line", of_the_day(lines(), 3))
def test_example_runs(line: str, tmp_path: Path) -> None:
    done = finished(command(line), cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr
    check_printed(ROOT / "examples" / f"{COMMAND.search(line)[2]}.py", done.stdout)


@pytest.mark.skipif(bool(WHY_NO_HOSTS), reason=WHY_NO_HOSTS)
def test_example_of_two_hosts_runs(tmp_path: Path) -> None:
    path = ROOT / "examples" / "two_hosts.py"
    line = COMMAND.search(docstring(path))[0]
    assert of_several_hosts(line)
    env = {"PYTHONPATH": str(ROOT), "PYCOMM_SECRET": secrets.token_hex(32)}
    with Network(2, ipv6=False) as net:
        started = []
        for host in net.hosts:  # which the line names host0 and host1
            made = command(line)
            made.insert(made.index("launch") + 1, f"--log-dir={tmp_path / host.name}")
            started.append(host.start(made, env))
        outputs = []
        for process in started:
            out, err = process.communicate(timeout=150)
            assert process.returncode == 0, out + err
            outputs.append(out)
    check_printed(path, outputs[0])
    assert "rank 0 by tcp, rank 1 by tcp, rank 2 by self, rank 3 by shm" in printed(outputs[1])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_is_short_and_listed(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100
    rows = [row for row in PAGE.read_text().splitlines() if f"[{path.name}]({path.name})" in row]
    assert len(rows) == 1
    assert f"`{COMMAND.search(docstring(path))[1]}" in rows[0]


def test_resnet_is_resnet_50() -> None:
    made = runpy.run_path(str(ROOT / "examples" / "resnet.py"))["resnet50"](1000)
    assert sum(p.numel() for p in made.parameters()) == 25_557_032
