"""The folders of a launcher: a temporary one, and one for the ranks' logs.

`kill -9` leaves the temporary folder behind; the user's next launch removes it. A launcher holds a
lock (flock(2)) on it, which the system releases when the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pycomm.errors import InvalidArgument

LOGS = "log"  # the default of --log-dir

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


def for_logs(given: str | None) -> str:
    """A new folder for the logs of this run, in the one of --log-dir. Without that option it is in
    `log` or, if that cannot be written to, in a temporary folder.

    Raises:
        InvalidArgument: the folder of --log-dir cannot be written to.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}"
    folder = Path(given or LOGS, name)
    try:
        folder.mkdir(parents=True)
    except OSError as error:  # not writable, or full
        if given:
            raise InvalidArgument(f"--log-dir {given}: {error.strerror}") from None
        folder = Path(tempfile.mkdtemp(prefix="pycomm_log_"), name)
        folder.mkdir()
        print(
            f"pycomm launch: {LOGS}: {error.strerror}; the ranks' output is in {folder.parent}; "
            "--log-dir sets another folder",
            file=sys.stderr,
        )
    return str(folder)


def link_logs(files: list[str]) -> None:
    """Links the logs of the latest run beside its folder, under their own names."""
    for file in map(Path, files):
        link, made = file.parent.parent / file.name, file.with_suffix(".link")
        with contextlib.suppress(OSError):  # a file system without links
            made.symlink_to(Path(file.parent.name, file.name))
            os.replace(made, link)


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
