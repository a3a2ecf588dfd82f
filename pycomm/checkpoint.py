"""pycomm.save and pycomm.load: rank 0 accesses the file for all ranks.

Files have torch's format. save() writes a temporary file beside the target and renames it, so a
file is either complete or absent.
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

from pycomm import _arguments as arguments
from pycomm import collectives, objects
from pycomm.default_group import chosen
from pycomm.errors import Error, InvalidArgument
from pycomm.group import Group

TOKEN_BYTES, SUFFIX = 8, ".tmp"  # of a temporary file's name: random bytes, and the extension


def save(obj: Any, path: str | os.PathLike[str], *, group: Group | None = None) -> None:
    """torch.save by rank 0; returns on every rank after the file is complete. Collective.

    Args:
        obj: what torch.save takes; only rank 0's is written.
        path: the file to write or replace, on rank 0's host; a symbolic link's target is replaced.
        group: the group to call in; None: the default group.

    Raises:
        InvalidArgument: `path` is no path; or `obj` holds per-rank state, of DGC or
            QuantizedGradients: use gather_state().
        Error: rank 0 could not write; on rank 0 the original error.
    """
    own = chosen(group)
    failure: BaseException | None = None
    if own.rank == 0:
        try:
            _refuse_own_state(obj)
            _write(obj, Path(arguments.path("path", path)))
        except Exception as error:  # of any kind: raised on all ranks
            failure = error
    _agree(failure, f"could not save {_named(path)}", own)


def load(
    path: str | os.PathLike[str],
    *,
    map_location: Any = "cpu",
    weights_only: bool = True,
    group: Group | None = None,
) -> Any:
    """torch.load of the file that rank 0 reads; the bytes are broadcast. Collective.

    Args:
        path: a file that rank 0 can read.
        map_location: as of torch.load.
        weights_only: as of torch.load; False can run code from the file.
        group: the group to call in; None: the default group.

    Returns:
        The object, on every rank.

    Raises:
        InvalidArgument: an argument is of another type.
        Error: rank 0 could not read; on rank 0 the original error.
    """
    import torch

    from pycomm._training.arguments import device_of

    own = chosen(group)
    weights_only = arguments.flag("weights_only", weights_only)
    if map_location is not None and not (callable(map_location) or isinstance(map_location, dict)):
        device_of("map_location", map_location)
    failure: BaseException | None = None
    content = np.empty(0, np.uint8)
    if own.rank == 0:
        try:
            content = np.fromfile(arguments.path("path", path), np.uint8)
        except Exception as error:  # of any kind: raised on all ranks
            failure = error
    _agree(failure, f"could not read {_named(path)}", own)
    length = collectives.broadcast(np.array([len(content)]), group=own)[0]
    if own.rank != 0:
        content = np.empty(length, np.uint8)
    collectives.broadcast(content, group=own)
    whole = io.BytesIO(content.tobytes())
    return torch.load(whole, map_location=map_location, weights_only=weights_only)


def _named(path: Any) -> str:
    """A path for an error, of any type: only rank 0 checks it."""
    return str(path) if isinstance(path, (str, os.PathLike)) else arguments.shown(path)


def _refuse_own_state(obj: Any) -> None:
    """Raises InvalidArgument if `obj` contains a compression's state of only one of several
    ranks."""
    if isinstance(obj, dict):
        own = obj.keys() >= {"rank", "size"} and not obj.keys().isdisjoint({"v", "residual"})
        if own and obj["size"] != 1:
            raise InvalidArgument(
                "save: the state of a compression differs by rank: save the result of its "
                "gather_state(), or each rank's state with torch.save"
            )
        if not obj.keys() >= {"size", "ranks"}:  # the state of all ranks may be saved
            for part in obj.values():
                _refuse_own_state(part)
    elif isinstance(obj, (list, tuple)):
        for part in obj:
            _refuse_own_state(part)


def _write(obj: Any, path: Path) -> None:
    """Replaces the file that `path` resolves to; an existing file keeps its mode."""
    import torch

    path = Path(os.path.realpath(path))  # of a symbolic link the target is replaced
    _remove_stale(path)
    descriptor, name = _temporary(path)
    with os.fdopen(descriptor, "wb") as file:
        try:
            torch.save(obj, file)
            with contextlib.suppress(FileNotFoundError):  # a new file keeps its mode
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.flush()
            os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:  # also Ctrl-C: no partial file may remain
            with contextlib.suppress(FileNotFoundError):  # os.replace() moved it
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
        with contextlib.suppress(FileExistsError):  # try another name
            # The kernel applies the umask: reading it with os.umask() would change it temporarily.
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(OSError):  # a file system without locks: nothing is stale
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor, name
            os.close(descriptor)  # another process removed it as stale before it was locked


def _remove_stale(path: Path) -> None:
    """Removes temporary files of killed processes beside `path`."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{{2 * TOKEN_BYTES}}}{SUFFIX}")
    with os.scandir(path.parent) as entries:
        found = [entry for entry in entries if pattern.fullmatch(entry.name)]
    for entry in found:
        # Locked: its process is running; or another user owns it.
        with contextlib.suppress(OSError):
            descriptor = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(descriptor)


def _agree(failure: BaseException | None, what: str, own: Group) -> None:
    """Collective: raises on every rank where rank 0 failed."""
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    received = objects.all_gather_object(text, group=own)[0]
    if failure is not None:
        raise failure
    if received is not None:
        raise Error(f"rank 0 {what}: {received}", rank=own.rank, peer=0)
