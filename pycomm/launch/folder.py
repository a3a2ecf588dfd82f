"""A temporary folder of a launcher. `kill -9` leaves it behind; the user's next launch removes it.

A launcher holds a lock (flock(2)) on its folder, which the system releases when the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["temporary"]

PREFIX = "pycomm_launch_"


@contextlib.contextmanager
def temporary() -> Iterator[str]:
    """A new folder, for its owner only; removes those of launchers that were killed."""
    place = Path(tempfile.gettempdir())
    for old in place.glob(f"{PREFIX}*"):
        _remove_if_unused(old)
    while True:
        made = tempfile.mkdtemp(prefix=PREFIX, dir=place)
        held = _lock(made)
        if held is not None:
            break  # else another launcher removed it as unused before it was locked
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(held)


def _lock(folder: str | Path) -> int | None:
    """A descriptor that holds the lock on a folder of this user; None if another process holds it,
    or the folder does not exist or another user owns it.
    """
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it does not exist, or is not a folder of ours
        return None
    try:
        if os.fstat(held).st_uid != os.geteuid():
            raise PermissionError
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(held), os.lstat(folder)):
            raise FileNotFoundError
    except OSError:  # another user's, locked, or replaced
        os.close(held)
        return None
    return held


def _remove_if_unused(folder: Path) -> None:
    held = _lock(folder)
    if held is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)
