"""The ranks of this host at one instant, for `pycomm top` and its metrics."""

from __future__ import annotations

import contextlib
import fnmatch
import time
from pathlib import Path

from pycomm.observe import flight_recorder, gpus
from pycomm.observe.flight_recorder import FlightRecord

LATE_S = 1.0  # after this time a rank that others wait for is marked as late


class Sample:
    """The flight records and GPUs at one instant; `at_ns` is the host's steady clock, as in the
    records. Only groups with a name like the pattern `group`, and processes with `program` in
    their command line."""

    def __init__(self, group: str | None = None, program: str | None = None) -> None:
        self.flight_records = [
            one
            for one in flight_recorder.running()
            if fnmatch.fnmatchcase(one.name, group or "*")
            and (program or "") in " ".join(_command(one))
        ]
        self.gpus = gpus.running()
        self.at_ns = time.monotonic_ns()


def state_of(now: Sample) -> dict[tuple[int, int], str]:
    """By id of the group and rank: the rank's problem, or ""."""
    found: dict[tuple[int, int], str] = {}
    for ranks in flight_recorder.groups_of(now.flight_records):
        most = max(_progress(one) for one in ranks)
        found |= {(one.id, one.rank): _state(one, most, now.at_ns) for one in ranks}
    return found


def _progress(one: FlightRecord) -> tuple[int, int, bool]:
    """A rank's progress: epoch and sequence of its last call, and whether it is complete."""
    if not len(one.records):
        return -1, -1, False
    last = one.records[-1]
    return int(last["epoch"]), int(last["sequence"]), not one.is_inside()


def _state(one: FlightRecord, most: tuple[int, int, bool], at_ns: int) -> str:
    """A rank's problem, or ""."""
    if one.reason:
        return "broken"
    if _is_stopped(one):
        return "stopped"
    behind = not one.is_inside() and _progress(one)[:2] < most[:2]
    if behind and (at_ns - int(one.records[-1]["ended"])) / 1e9 > LATE_S:
        return "late"
    return ""


def _is_stopped(one: FlightRecord) -> bool:
    """Whether the process was stopped by a signal or a debugger."""
    with contextlib.suppress(OSError):  # it has ended
        stat = Path(*Path(one.source).parts[:3], "stat").read_text()
        return stat.rpartition(")")[2].split()[0] in "Tt"
    return False


def _command(one: FlightRecord) -> list[str]:
    """The command line of a rank's process."""
    with contextlib.suppress(OSError):  # it has ended
        line = Path(*Path(one.source).parts[:3], "cmdline").read_bytes()
        return line.decode(errors="replace").rstrip("\0").split("\0")
    return []


def program(one: FlightRecord) -> str:
    """The program of a rank: that of pycomm's launcher, a script, a module or a command."""
    command, *words = _command(one) or [""]
    words = words[words.index("--") + 1 :] if "--" in words else words
    if "-c" in words:
        return f"{Path(command).name} -c"
    return Path(next((word for word in words if not word.startswith("-")), command)).name
