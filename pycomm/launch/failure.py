"""Failure reports of ranks, and which failure came first.

A rank writes its report in the format of torch's elastic launcher, with additions; the launcher
reads it. Across hosts, whose clocks differ, the order is that of arrival in torch's store.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

CONSEQUENCES = ("PeerLost", "GroupBroken")  # another rank's failure, as this one saw it
KEY = "pycomm/first_failure"
STORE_LIMIT_S = 10
CAUSE_LIMIT_S = 1  # for the named peer to report its failure first
# Frames above the user's: this package and runpy.
OURS = (str(Path(__file__).parent), "<frozen runpy>")


@dataclass(frozen=True)
class Failure:
    """A rank's failure.

    Attributes:
        rank, host, pid: the rank and its process.
        kind: the class of its error; "" if it ended without a report.
        text: the error's text, or how it ended.
        trace: its traceback as text, or "".
        when: seconds since the epoch by its host's clock; 0 if it ended without a report.
        status: the launcher's exit status for it.
    """

    rank: int
    host: str
    pid: int
    kind: str
    text: str
    trace: str = ""
    when: float = 0.0
    status: int = 1

    def __str__(self) -> str:
        """Rank and error in one line."""
        what = f"{self.kind}: {self.text}" if self.kind else self.text
        return f"rank {self.rank} on host {self.host} (pid {self.pid}): {what}"


def of_error(rank: int, error: BaseException) -> Failure:
    """This process's failure with `error`, which is being handled."""
    status, text = 1, str(error)
    frames = _users_part(error.__traceback__)
    trace = "".join(traceback.format_exception(type(error), error, frames))
    if isinstance(error, SystemExit):
        trace = ""
        if isinstance(error.code, int):
            status, text = error.code, f"exit status {error.code}"
    kind = type(error).__name__
    return Failure(rank, socket.gethostname(), os.getpid(), kind, text, trace, time.time(), status)


def of_exit(rank: int, pid: int, exitcode: int) -> Failure:
    """The failure of a process of this host that ended without a report."""
    host = socket.gethostname()
    if exitcode >= 0:
        return Failure(rank, host, pid, "", f"ended with exit status {exitcode}", status=exitcode)
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:  # a signal without a name
        name = f"signal {-exitcode}"
    return Failure(rank, host, pid, "", f"was ended by {name}", status=128 - exitcode)


def first(failures: Iterable[Failure]) -> Failure:
    """The failure that caused the others: not one that the launcher ended or that names another
    rank; a death without a report precedes reports about it.
    """

    def order(one: Failure) -> tuple[bool, bool, float]:
        by_launcher = not one.kind and one.status == 128 + signal.SIGTERM
        return by_launcher, one.kind in CONSEQUENCES, one.when

    return min(failures, key=order)


def write(path: str, mine: Failure, cause: Failure | None) -> None:
    """Writes this rank's failure for the launcher, and the run's first if that is another's."""
    content = {
        "message": str(mine),
        "timestamp": int(mine.when),  # these two are what torch reads
        "pycomm": asdict(mine),
        "cause": asdict(cause) if cause else None,
    }
    Path(path).write_text(json.dumps(content))


def read(content: dict[str, Any]) -> list[Failure]:
    """The reports of write(): the rank's failure and, if it is another's, the cause; [] if none."""
    found = [content.get("pycomm"), content.get("cause")]
    return [failure for fields in found if (failure := _of_fields(fields))]


def _of_fields(given: object) -> Failure | None:
    """The failure with these fields; None unless they are exactly this version's fields."""
    expected = {one.name: one.type for one in fields(Failure)}  # the names of their types
    if not isinstance(given, dict):
        return None
    found = {name: type(value).__name__ for name, value in given.items()}
    return Failure(**given) if found == expected else None


def post(mine: Failure, host: str, port: int) -> Failure | None:
    """Reports the failure to the other hosts in torch's store, which a launcher serves; returns the
    first reported failure if that is another's. None if the store ended or has invalid content. A
    failure that names another rank gives that rank time to report first.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs hide it

    try:
        store = TCPStore(host, port, None, False, timedelta(seconds=STORE_LIMIT_S))
        if mine.kind in CONSEQUENCES:
            with contextlib.suppress(RuntimeError):  # no rank reported
                store.wait([KEY], timedelta(seconds=CAUSE_LIMIT_S))
        stored = store.compare_set(KEY, "", json.dumps(asdict(mine)))
        cause = _of_fields(json.loads(stored))
    except (RuntimeError, ValueError, RecursionError):  # it ended, or its content is invalid
        return None
    return None if cause == mine else cause


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the user's code."""
    at = frames
    while at is not None and at.tb_frame.f_code.co_filename.startswith(OURS):
        at = at.tb_next
    return at or frames
