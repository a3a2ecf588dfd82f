"""The algorithm thresholds that `pycomm tune` measured: a file in the user's cache folder.

The file's name and content identify the machine, so one home directory serves many machines. Rank
0's thresholds apply to all ranks of a group (they are part of its rank info), so the ranks always
choose the same algorithm.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from pathlib import Path

from pycomm import config

FORMAT = 1
BUILT_IN = (16 << 10, 1 << 20)
"""small_bytes and middle_bytes of collectives/choose.h."""
LARGEST = 1 << 40  # bytes: the largest valid threshold

Thresholds = list[tuple[str, int, int]]
"""For each measured transport: its name, small_bytes, middle_bytes."""


def machine() -> str:
    """The machine's properties that affect thresholds: name, processor, cores, kernel."""
    return f"{platform.node()}, {platform.machine()}, {os.cpu_count()} cores, {platform.release()}"


def path() -> Path:
    """The file of this machine's thresholds."""
    key = hashlib.sha256(platform.node().encode()).hexdigest()[:12]
    return config.cache_folder() / f"tuned-{key}.json"


def thresholds() -> Thresholds:
    """The stored thresholds; [] without a file, or with a warning if the file is invalid."""
    try:
        text = path().read_text()
    except FileNotFoundError:  # `pycomm tune` did not run here
        return []
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        return _warn_invalid(f"cannot be read: {error}")
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            return _warn_invalid(f"has format {content['format']}, but this pycomm reads {FORMAT}")
        if content["machine"] != machine():
            return _warn_invalid(
                f"is of another machine ({content['machine']}), not of {machine()}"
            )
        return [_checked(by, **found) for by, found in content["thresholds"].items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return _warn_invalid(f"is damaged ({type(error).__name__}: {error})")


def save(found: Thresholds) -> Path:
    """Merges `found` into this machine's file atomically; returns the file."""
    kept = {by: at for by, *at in thresholds()} | {by: at for by, *at in found}
    content = {
        "format": FORMAT,
        "machine": machine(),
        "thresholds": {
            by: {"small_bytes": small, "middle_bytes": middle}
            for by, (small, middle) in kept.items()
        },
    }
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
        new.write(json.dumps(content, indent=1) + "\n")
    Path(new.name).replace(file)
    return file


def _checked(by: str, small_bytes: int, middle_bytes: int) -> tuple[str, int, int]:
    if by not in config.TRANSPORTS:
        raise ValueError(f"no transport {by!r}")
    for value in (small_bytes, middle_bytes):
        if type(value) is not int or not 0 <= value <= LARGEST:
            raise ValueError(f"invalid number of bytes: {value!r}")
    return by, small_bytes, middle_bytes


def _warn_invalid(why: str) -> Thresholds:
    logging.getLogger("pycomm").warning(
        "%s %s; using the built-in thresholds. `pycomm tune` writes a new file.", path(), why
    )
    return []
