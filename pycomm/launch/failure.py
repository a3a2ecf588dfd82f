"""What is known of a rank that failed, and which failure came first.

The rank writes it down (as torch's elastic launcher expects it, beside what we add), the launcher
reads it. Between hosts, whose clocks differ, the order is that in which they came to torch's store.
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
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Failure", "first", "of_error", "of_exit", "post", "read", "write"]

CONSEQUENCES = ("PeerLost", "GroupBroken")  # another rank's failure, as this one saw it
KEY = "pycomm/first_failure"
STORE_LIMIT_S = 10
CAUSE_LIMIT_S = 1  # for a rank that is blamed to tell its failure first
# Frames above the user's: this package and what runs scripts.
OURS = (str(Path(__file__).parent), "<frozen runpy>")


@dataclass(frozen=True)
class Failure:
    """How a rank ended badly.

    Attributes:
        rank, host, pid: who.
        kind: the class of its error; "" where it ended without a word.
        text: the error's text, or how it ended.
        trace: its traceback as text, or "".
        when: seconds since the epoch by its host's clock; 0 where it ended without a word.
        status: what the launcher exits with for it.
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
        """Who and what, in a line."""
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
    """That of a process of this host that said nothing."""
    host = socket.gethostname()
    if exitcode >= 0:
        return Failure(rank, host, pid, "", f"ended with exit status {exitcode}", status=exitcode)
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:  # a signal without a name
        name = f"signal {-exitcode}"
    return Failure(rank, host, pid, "", f"was ended by {name}", status=128 - exitcode)


def first(failures: Iterable[Failure]) -> Failure:
    """Whose failure was the cause: not one that was ended by the launcher or blames another rank;
    a death without a word before what others said of it."""

    def order(one: Failure) -> tuple[bool, bool, float]:
        by_launcher = not one.kind and one.status == 128 + signal.SIGTERM
        return by_launcher, one.kind in CONSEQUENCES, one.when

    return min(failures, key=order)


def write(path: str, mine: Failure, cause: Failure | None) -> None:
    """Leaves this rank's failure, and the run's first if that is another's, for the launcher."""
    content = {
        "message": str(mine),
        "timestamp": int(mine.when),  # these two are what torch reads
        "pycomm": asdict(mine),
        "cause": asdict(cause) if cause else None,
    }
    Path(path).write_text(json.dumps(content))


def read(content: dict[str, Any]) -> list[Failure]:
    """What write() left: the rank's failure and, if it is another's, the cause; [] if nothing."""
    found = [content.get("pycomm"), content.get("cause")]
    return [failure for fields in found if (failure := _of_fields(fields))]


def _of_fields(given: object) -> Failure | None:
    """The failure with these fields, as another program or version of pycomm may have written
    them; None where they are not exactly ours."""
    expected = {"rank": int, "host": str, "pid": int, "kind": str, "text": str, "trace": str}
    expected |= {"when": float, "status": int}
    if not isinstance(given, dict) or given.keys() != expected.keys():
        return None
    if not all(type(given[name]) is kind for name, kind in expected.items()):
        return None
    return Failure(**given)


def post(mine: Failure, host: str, port: int) -> Failure | None:
    """Tells the other hosts by torch's store, which a launcher serves there; gives the failure
    that was told first, if that is another's. None where the store has gone or holds what is not
    ours. What blames another rank leaves that rank the time to tell first."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs hide it

    try:
        store = TCPStore(host, port, None, False, timedelta(seconds=STORE_LIMIT_S))
        if mine.kind in CONSEQUENCES:
            with contextlib.suppress(RuntimeError):  # nobody has
                store.wait([KEY], timedelta(seconds=CAUSE_LIMIT_S))
        told = store.compare_set(KEY, "", json.dumps(asdict(mine)))
        cause = _of_fields(json.loads(told))
    except (RuntimeError, ValueError, RecursionError):  # gone, or holds nothing of ours
        return None
    return None if cause == mine else cause


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is the user's."""
    at = frames
    while at is not None and at.tb_frame.f_code.co_filename.startswith(OURS):
        at = at.tb_next
    return at or frames
