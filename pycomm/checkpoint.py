"""Rank 0 saves and loads for all ranks. Called by users as pycomm.save and pycomm.load.

Files are torch's. Who saves writes beside the file and renames, so that a file is whole or absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

import numpy as np

from pycomm import collectives, objects
from pycomm.errors import Error, InvalidArgument
from pycomm.group import Group, default

__all__ = ["load", "save"]

TOKEN_BYTES, SUFFIX = 8, ".tmp"  # of a temporary file's name: random, and its end


def save(obj: Any, path: str | os.PathLike[str], *, group: Group | None = None) -> None:
    """torch.save by rank 0; returns on every rank once the file is there. Collective.

    Raises:
        InvalidArgument: `obj` holds what differs by rank, as DGC's state: use gather_state().
        Error: rank 0 could not write; there the error itself.
    """
    own = group or default()
    failure: BaseException | None = None
    if own.rank == 0:
        try:
            _refuse_own_state(obj)
            _write(obj, Path(path))
        except Exception as error:  # whatever it is, all ranks are told
            failure = error
    _agree(failure, f"could not save {path}", own)


def load(
    path: str | os.PathLike[str],
    *,
    map_location: Any = "cpu",
    weights_only: bool = True,
    group: Group | None = None,
) -> Any:
    """torch.load of what rank 0 reads; the bytes are broadcast. Collective.

    Args:
        path: a file that rank 0 can read.
        map_location, weights_only: as of torch.load; weights_only=False can run code.
        group: whose ranks; None is the default group.

    Raises:
        Error: rank 0 could not read; there the error itself.
    """
    import torch

    own = group or default()
    failure: BaseException | None = None
    content = np.empty(0, np.uint8)
    if own.rank == 0:
        try:
            content = np.fromfile(os.fspath(path), np.uint8)
        except Exception as error:  # whatever it is, all ranks are told
            failure = error
    _agree(failure, f"could not read {path}", own)
    length = collectives.broadcast(np.array([len(content)]), group=own)[0]
    if own.rank != 0:
        content = np.empty(length, np.uint8)
    collectives.broadcast(content, group=own)
    whole = io.BytesIO(content.tobytes())
    return torch.load(whole, map_location=map_location, weights_only=weights_only)


def _refuse_own_state(obj: Any) -> None:
    """Raises InvalidArgument for one rank's DGC state of several, anywhere in lists and dicts."""
    if isinstance(obj, dict):
        if obj.keys() >= {"rank", "size", "u", "v"} and obj["size"] != 1:
            raise InvalidArgument(
                "save: DGC's state differs by rank: save what dgc.gather_state() gives, or each "
                "rank's with torch.save"
            )
        if not obj.keys() >= {"size", "ranks"}:  # all ranks' may be saved
            for part in obj.values():
                _refuse_own_state(part)
    elif isinstance(obj, (list, tuple)):
        for part in obj:
            _refuse_own_state(part)


def _write(obj: Any, path: Path) -> None:
    """Replaces the file that `path` leads to; a file that is there keeps its mode."""
    import torch

    path = Path(os.path.realpath(path))  # of a symbolic link the target is replaced
    _remove_stale(path)
    descriptor, name = _temporary(path)
    with os.fdopen(descriptor, "wb") as file:
        try:
            torch.save(obj, file)
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.flush()
            os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:  # Ctrl-C too: half a file must not stay
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # the new name survives a power failure
    finally:
        os.close(folder)


def _temporary(path: Path) -> tuple[int, str]:
    """A new file beside `path`, locked while it is open: the descriptor and the name."""
    while True:
        name = str(path.parent / f".{path.name}.{secrets.token_hex(TOKEN_BYTES)}{SUFFIX}")
        with contextlib.suppress(FileExistsError):
            # The kernel applies the umask: to read it by os.umask() would change it meanwhile.
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(OSError):  # a file system without locks: nothing is stale
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor, name
            os.close(descriptor)  # another process took it for stale before it was locked


def _remove_stale(path: Path) -> None:
    """Removes what processes that were killed in save() have left beside `path`."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{{2 * TOKEN_BYTES}}}{SUFFIX}")
    with os.scandir(path.parent) as entries:
        found = [entry for entry in entries if pattern.fullmatch(entry.name)]
    for entry in found:
        with contextlib.suppress(OSError):  # locked: its process lives; or it is another user's
            descriptor = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(descriptor)


def _agree(failure: BaseException | None, what: str, own: Group) -> None:
    """Collective: raises on every rank where rank 0 failed."""
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    told = objects.all_gather_object(text, group=own)[0]
    if failure is not None:
        raise failure
    if told is not None:
        raise Error(f"rank 0 {what}: {told}", rank=own.rank, peer=0)
