"""`pycomm`: what all commands share: help without slow imports, typing errors, completion, JSON."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from finished import finished

import pycomm
from pycomm.__main__ import main
from pycomm._command_line import COMMANDS
from pycomm.bench import BENCHMARKS
from pycomm.testing import run_ranks

PACKAGED = [name for name, one in BENCHMARKS.items() if one.module.startswith("pycomm.")]
HELP = [[], *([name] for name in COMMANDS), *(["bench", name] for name in PACKAGED)]
ASKS = """
import sys
from pycomm.__main__ import main
try:
    main([*sys.argv[1:], "--help"])
except SystemExit as end:  # of --help
    assert end.code == 0
found = {"torch", "numpy", "matplotlib", "pycomm._core"} & sys.modules.keys()
sys.exit(f"imported: {found}" if found else 0)
"""


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_imports_neither_torch_nor_numpy(words: list[str]) -> None:
    done = finished([sys.executable, "-c", ASKS, *words])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" ".join(["usage: pycomm", *words]))


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    expected = importlib.metadata.version("pycomm-collectives")
    assert capsys.readouterr().out == f"pycomm {expected}\n"


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["lauch"], "launch"),
        (["top", "--onec"], "--once"),
        (["doctor", "--jsno"], "--json"),
        (["launch", "--nporc", "2", "x.py"], "--nproc"),
        (["launch", "--nnode", "2", "--encrpyt", "x.py"], "--encrypt"),
        (["bench", "collectives", "--dtyp", "int8", "--rank", "2", "--opss", "x"], "--ops"),
        (["completion", "bsh"], "bash"),
    ],
)
def test_the_nearest_name_is_shown(
    words: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2
    assert f": did you mean {near}?" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_has_all_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("doctor", "min-ranks", "rdzv-endpoint", "once", "collectives"):
        assert word in script


COMPLETES = """
source <(printf '%s' "$0")
COMP_WORDS=({words}); COMP_CWORD={at}; _shtab_pycomm; echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "at", "expected"),
    [
        ("pycomm la", 1, "launch"),
        ("pycomm top --on", 2, "--once"),
        ("pycomm trace tr", 2, "traces"),
    ],
)
def test_bash_completes(
    words: str, at: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed")
    main(["completion", "bash"])
    (tmp_path / "traces").mkdir()
    command = ["bash", "-c", COMPLETES.format(words=words, at=at), capsys.readouterr().out]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [expected], shown.stderr


def fails(group: pycomm.Group) -> None:
    pycomm.all_reduce(np.ones(10, np.float32), group=group)
    if group.rank == 0:
        group.abort("of this test")


def test_info_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["transports"]["shm"] == "yes"
    assert "float32" in shown["collectives"]["dtypes"].split()
    assert shown["environment"]["PYCOMM_TRANSPORT"] == ""
    monkeypatch.setenv("PYCOMM_FLIGHT_RECORD", str(tmp_path / "calls"))
    run_ranks(1, fails)
    (file,) = tmp_path.iterdir()
    assert main(["info", "--json", "--flight", str(file)]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["name"], record["rank"], record["size"]) == ("world", 0, 1)
    assert "of this test" in record["reason"]
    assert record["calls"][-1]["call"] == "all_reduce(float32, 10, sum)"
    assert record["calls"][-1]["outcome"] == "done"
