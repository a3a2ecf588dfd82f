"""tools/environment.py changes no environment that `.venv` only links to."""

import shutil
import sys
from pathlib import Path

import pytest
from finished import finished
from paths import ROOT

pytestmark = pytest.mark.no_attack("starts no ranks")


def test_a_linked_environment_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "environment.py", tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / ".venv").symlink_to("elsewhere")
    command = [sys.executable, "tools/environment.py"]
    done = finished(command, cwd=tmp_path, timeout=100)
    assert done.returncode == 1
    assert ".venv is a symbolic link" in done.stderr
    assert (tmp_path / "elsewhere" / "kept").exists()
