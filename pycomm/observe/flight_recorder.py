"""Reads the flight recorder: the ranks' calls in memory, in flight records and in traces.

All three have one layout (csrc/observe/flight_recorder.h): a header and a record of 64 bytes for
each call. Any bytes give a FlightRecord or InvalidArgument. `flight_report`, `trace` and `top` show
them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pycomm import _core
from pycomm.errors import InvalidArgument

MAGIC = b"PYCOMMJ1"
HEAD_BYTES = 4096
HEAD = np.dtype(
    [
        ("magic", "S8"),
        *((name, "<u8") for name in ("capacity", "begun")),
        *((name, "<i8") for name in ("steady_ns", "wall_ns")),
        *((name, "<u8") for name in ("calls", "bytes_written", "bytes_received")),
        *((name, "<i8") for name in ("waited", "inside")),
        *(("id", "<u8"), ("pid", "<i8"), ("rank", "<i4"), ("size", "<i4")),
        *(("name", "S128"), ("host", "S128"), ("host_id", "S64"), ("reason", "S1024")),
        ("closed", "<u8"),
    ]
)
CALL = np.dtype(
    [
        *(("begun", "<i8"), ("ended", "<i8"), ("count", "<u8")),
        *(("bytes_written", "<u8"), ("waited", "<i8")),
        *(("sequence", "<u4"), ("tag", "<u4"), ("peer", "<i4"), ("epoch", "<u2")),
        *((name, "u1") for name in ("operation", "dtype", "op", "algorithm", "outcome")),
        ("unused", "V5"),
    ]
)
# Of the memory of a process: csrc/observe/flight_recorder.cpp.
RECORD_BYTES = HEAD_BYTES + 256 * CALL.itemsize
PLACES = 64
TABLES = {
    "operation": _core.OPERATIONS,
    "dtype": _core.DTYPES,
    "op": _core.REDUCE_OPS,
    "algorithm": _core.ALGORITHMS,
    "outcome": ("under way", "done", "failed"),
}
MEMORY_NAME = "/memfd:pycomm-flight-recorder"
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True)
class FlightRecord:
    """One rank's calls in one group.

    Attributes:
        source: the file that was read.
        rank, size, name, id: the rank and its group; the ranks of a group have the same id.
        host, host_id, pid: its process; ranks with the same host_id share a steady clock.
        steady_ns, wall_ns: the same instant on the steady clock and in Unix time.
        calls, bytes_written, bytes_received, waited, inside: totals of the completed calls;
            `waited` and `inside` (time in calls) in nanoseconds.
        begun: number of calls that began.
        reason: why the group broke, or "".
        records: an array of dtype CALL, oldest first: the last calls, or in a trace all calls.
    """

    source: str
    rank: int
    size: int
    name: str
    id: int
    host: str
    host_id: str
    pid: int
    steady_ns: int
    wall_ns: int
    calls: int
    bytes_written: int
    bytes_received: int
    waited: int
    inside: int
    begun: int
    reason: str
    records: Any

    def is_inside(self) -> bool:
        """Whether the rank was inside a call."""
        return bool(len(self.records) and self.records[-1]["outcome"] == 0)


def parse(data: bytes, source: str) -> FlightRecord:
    """Parses a flight record.

    Raises:
        InvalidArgument: the bytes are not a flight record; the text names `source`.
    """
    if len(data) < HEAD_BYTES or not data.startswith(MAGIC):
        raise InvalidArgument(
            f"{source} is not a flight record of this version of pycomm: it has {len(data)} bytes "
            f"and begins with {data[:8]!r}, expected {MAGIC!r}"
        )
    head = np.frombuffer(data, HEAD, 1)[0]
    space = (len(data) - HEAD_BYTES) // CALL.itemsize
    begun, capacity = int(head["begun"]), int(head["capacity"])
    if space < min(begun, capacity or begun) or not 0 <= head["rank"] < head["size"]:
        raise InvalidArgument(
            f"{source} is damaged: it declares {begun} calls of rank {head['rank']} of "
            f"{head['size']} and has space for {space}"
        )
    records = np.frombuffer(data, CALL, min(begun, space), HEAD_BYTES)
    if capacity and begun > capacity:
        records = np.roll(records[:capacity], -(begun % capacity))
    for field, table in TABLES.items():
        if np.any(records[field] >= len(table)):
            raise InvalidArgument(f"{source} is damaged: a call has an unknown {field}")
    fields: dict[str, Any] = {name: head[name].item() for name in HEAD.names or ()}
    del fields["magic"], fields["capacity"], fields["closed"]
    for name in ("name", "host", "host_id", "reason"):
        fields[name] = _text(fields[name])
    return FlightRecord(source=source, records=records, **fields)


def _text(raw: bytes) -> str:
    """Decodes a text; replaces characters that a terminal would interpret."""
    text = raw.decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def read(path: str | Path) -> FlightRecord:
    """The flight record in a file.

    Raises:
        InvalidArgument: the file cannot be read or is not a flight record.
    """
    try:
        return parse(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error


def running() -> list[FlightRecord]:
    """The flight records of this host's processes that this user may read, also of stopped ones.

    Reads their memory through /proc, which checks permissions; the processes are not involved.
    """
    found: dict[int, list[FlightRecord]] = {}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # another user's process, or it has ended
            for link in folder.iterdir():
                with contextlib.suppress(OSError):  # the descriptor may be closed
                    if not os.readlink(link).startswith(MEMORY_NAME):
                        continue
                    memory = link.stat().st_ino  # the same in a forked child
                    if memory not in found:
                        found[memory] = list(_records_of(link))
    records = itertools.chain(*found.values())
    return sorted(records, key=lambda one: (one.name, one.id, one.rank))


def _records_of(path: Path) -> Iterator[FlightRecord]:
    """The records in a memory, without those that are incomplete or of closed groups."""
    with path.open("rb", buffering=0) as memory:  # of another process: do not trust its size
        for place in range(PLACES):
            with contextlib.suppress(InvalidArgument):
                yield _consistent(memory.fileno(), place * RECORD_BYTES, str(path))


def _consistent(memory: int, at: int, source: str) -> FlightRecord:
    """A consistent copy of a record that its process is writing: drops records that were
    overwritten during the read.

    Raises:
        InvalidArgument: there is none at `at`, or another group's is there now.
    """
    before = parse(os.pread(memory, RECORD_BYTES, at), source)
    head = os.pread(memory, HEAD_BYTES, at)
    after = np.frombuffer(head, HEAD, 1)[0] if len(head) == HEAD_BYTES else None
    if after is None or after["closed"] or after["id"] != before.id:
        raise InvalidArgument(f"{source} was closed or truncated")
    torn = int(after["begun"]) - before.begun + 1
    if len(before.records) + torn <= int(after["capacity"]):
        return before
    return FlightRecord(**{**vars(before), "records": before.records[torn:]})


def groups_of(flight_records: Iterable[FlightRecord]) -> list[list[FlightRecord]]:
    """The flight records by group, in rank order."""
    by_id: dict[int, list[FlightRecord]] = {}
    for one in flight_records:
        by_id.setdefault(one.id, []).append(one)
    return [sorted(group, key=lambda one: one.rank) for group in by_id.values()]


def title(call: Any) -> str:
    """A description of a record's call, the same on all ranks: "all_reduce(float32, 10, sum)"."""
    verb = TABLES["operation"][call["operation"]]
    if verb == "barrier":
        return "barrier()"
    words = [TABLES["dtype"][call["dtype"]], f"{call['count']:,}"]
    if verb in REDUCING:
        words.append(TABLES["op"][call["op"]])
    if verb in ROOTED:
        words.append(f"root {call['peer']}")
    if verb in ("send", "recv"):
        whom = "any rank" if call["peer"] < 0 else f"rank {call['peer']}"
        words.append(f"{'to' if verb == 'send' else 'from'} {whom}, tag {call['tag']}")
    return f"{verb}({', '.join(words)})"


def bytes_of(call: Any) -> int:
    """The size in bytes of the call's count."""
    bits = re.search("[0-9]+", TABLES["dtype"][call["dtype"]])
    return int(call["count"]) * (int(bits.group()) // 8 if bits else 1)
