"""The files that pycomm.save writes, and loads that fail on rank 0."""

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import Group, checkpoint, errors
from pycomm.testing import run_ranks

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def private() -> Iterator[None]:
    """A umask under which other users cannot read."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def save(path: Path, value: int = 1) -> None:
    run_ranks(1, lambda group: pycomm.save({"x": value}, path, group=group))
    assert torch.load(path) == {"x": value}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_of_other_threads_obey_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(mask: int) -> int:
        raise AssertionError(f"save changed the umask of the whole process to {mask:o}")

    monkeypatch.setattr(os, "umask", changed)
    save(tmp_path / "new")
    assert mode(tmp_path / "new") == 0o600


def test_existing_file_keeps_its_mode(tmp_path: Path) -> None:
    for wanted in (0o640, 0o600, 0o604):
        (tmp_path / "old").touch()
        (tmp_path / "old").chmod(wanted)
        save(tmp_path / "old")
        assert mode(tmp_path / "old") == wanted


def test_the_target_of_a_symbolic_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / "target"
    link.symlink_to("there/target")
    for value in range(2):  # first there is no target
        save(link, value)
        assert link.is_symlink()
        assert torch.load(target) == {"x": value}
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]
    assert os.listdir(target.parent) == ["target"]


def test_the_folder_is_synchronized_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synchronize(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def rename(source: str, target: Path) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synchronize)
    monkeypatch.setattr(os, "replace", rename)
    save(tmp_path / "new")
    assert done == ["file", "rename", "folder"]


KILLED = """
import os, sys
import torch
import pycomm
from pycomm.testing import run_ranks
torch.save = lambda *_: os.kill(os.getpid(), 9)
run_ranks(1, lambda group: pycomm.save({}, sys.argv[1], group=group))
"""


def test_only_files_of_killed_ranks_are_removed(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "it"], check=False)
    assert killed.returncode == -signal.SIGKILL
    (stale,) = os.listdir(tmp_path)
    other = tmp_path / ".it.note"
    other.touch()
    descriptor, busy = checkpoint._temporary(tmp_path / "it")  # of a rank that is still writing
    try:
        save(tmp_path / "it")
        assert sorted(os.listdir(tmp_path)) == sorted([other.name, Path(busy).name, "it"])
        assert stale != Path(busy).name
    finally:
        os.close(descriptor)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="pickle"):
        run_ranks(1, lambda group: pycomm.save(threading.Lock(), tmp_path / "it", group=group))
    assert os.listdir(tmp_path) == []


def load_and_continue(group: Group, path: Any) -> tuple[str, float]:
    with pytest.raises((errors.Error, TypeError, MemoryError)) as caught:
        pycomm.load(path, group=group)
    return type(caught.value).__name__, float(pycomm.all_reduce(np.ones(1), group=group)[0])


def test_invalid_path_fails_on_every_rank() -> None:
    assert run_ranks(2, load_and_continue, None, timeout_s=20) == [
        ("InvalidArgument", 2),
        ("Error", 2),
    ]


def test_a_file_that_does_not_fit_fails_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(np, "fromfile", too_large)
    assert run_ranks(2, load_and_continue, "x", timeout_s=20) == [("MemoryError", 2), ("Error", 2)]
