"""What ranks called, as the core leaves it: in memory, in flight records, in traces.

One layout for all three (flight_recorder.h): a head and a record of 64 bytes for each call.
Bytes from outside give a Journal or InvalidArgument, whatever they are. `flight`, `trace` and `top`
show them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pycomm import _core
from pycomm.errors import InvalidArgument

__all__ = ["Journal", "parse", "read", "running", "title"]

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
MEMORY_BYTES = HEAD_BYTES + 256 * CALL.itemsize  # of what a rank keeps in memory: journal.cpp
TABLES = {
    "operation": _core.OPERATIONS,
    "dtype": _core.DTYPES,
    "op": _core.REDUCE_OPS,
    "algorithm": _core.ALGORITHMS,
    "outcome": ("under way", "done", "failed"),
}
MEMORY_NAME = "/memfd:pycomm-journal"
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True)
class Journal:
    """One rank's calls in one group.

    Attributes:
        source: where it was read.
        rank, size, name, id: the rank, and its group; ranks of one group have the same id.
        host, host_id, pid: who it is; ranks with one host_id have one steady clock.
        steady_ns, wall_ns: one moment by the steady clock and by the time of day.
        calls, bytes_written, bytes_received, waited, inside: totals of the calls that are over;
            `waited` and `inside` (in calls) in nanoseconds.
        begun: how many calls have begun.
        reason: why the group broke, or "".
        records: an array of dtype CALL, oldest first: the last ones, or in a trace all.
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


def parse(data: bytes, source: str) -> Journal:
    """The journal that these bytes are.

    Raises:
        InvalidArgument: they are none; the text names `source`.
    """
    if len(data) < HEAD_BYTES or not data.startswith(MAGIC):
        raise InvalidArgument(
            f"{source} is no record of calls of this version of pycomm: it has {len(data)} bytes "
            f"and begins with {data[:8]!r}, not {MAGIC!r}"
        )
    head = np.frombuffer(data, HEAD, 1)[0]
    room = (len(data) - HEAD_BYTES) // CALL.itemsize
    begun, capacity = int(head["begun"]), int(head["capacity"])
    if room < min(begun, capacity or begun) or not 0 <= head["rank"] < head["size"]:
        raise InvalidArgument(
            f"{source} is damaged: it speaks of {begun} calls of rank {head['rank']} of "
            f"{head['size']} and has room for {room}"
        )
    records = np.frombuffer(data, CALL, min(begun, room), HEAD_BYTES)
    if capacity and begun > capacity:
        records = np.roll(records[:capacity], -(begun % capacity))
    for field, table in TABLES.items():
        if np.any(records[field] >= len(table)):
            raise InvalidArgument(f"{source} is damaged: a call has no such {field}")
    fields: dict[str, Any] = {name: head[name].item() for name in HEAD.names or ()}
    del fields["magic"], fields["capacity"]
    for name in ("name", "host", "host_id", "reason"):
        fields[name] = _text(fields[name])
    return Journal(source=source, records=records, **fields)


def _text(raw: bytes) -> str:
    """A text of the core's, with nothing in it that a terminal would obey."""
    text = raw.decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def read(path: str | Path) -> Journal:
    """The journal in a file.

    Raises:
        InvalidArgument: there is none, or it cannot be read.
    """
    try:
        return parse(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error


def running() -> list[Journal]:
    """Those of the processes of this host that this user may look into, stopped ones too.

    Nothing is asked of the processes: their memory is read through /proc, whose rules say who may.
    """
    found: dict[int, Journal] = {}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # another user's process, or it has ended
            for link in folder.iterdir():
                # A descriptor may be gone, and what begins is not all there: then at the next look.
                with contextlib.suppress(OSError, InvalidArgument):
                    if not os.readlink(link).startswith(MEMORY_NAME):
                        continue
                    memory = link.stat().st_ino  # the same in a forked child
                    if memory not in found:
                        found[memory] = _consistent(link)
    return sorted(found.values(), key=lambda one: (one.name, one.id, one.rank))


def _consistent(path: Path) -> Journal:
    """What stands there while its process goes on: records that were written over meanwhile go."""
    with path.open("rb", buffering=0) as memory:  # of another's making: its size says nothing
        before = parse(memory.read(MEMORY_BYTES), str(path))
        memory.seek(0)
        head = memory.read(HEAD_BYTES)
        if len(head) < HEAD_BYTES:
            raise InvalidArgument(f"{path} was cut short meanwhile")
        after = np.frombuffer(head, HEAD, 1)[0]
    torn = int(after["begun"]) - before.begun + 1
    if len(before.records) + torn <= int(after["capacity"]):
        return before
    return Journal(**{**vars(before), "records": before.records[torn:]})


def groups_of(journals: Iterable[Journal]) -> list[list[Journal]]:
    """The journals by group, ranks in order."""
    by_id: dict[int, list[Journal]] = {}
    for one in journals:
        by_id.setdefault(one.id, []).append(one)
    return [sorted(group, key=lambda one: one.rank) for group in by_id.values()]


def title(call: Any) -> str:
    """A record's call in words, the same on all ranks of it: "all_reduce(float32, 10, sum)"."""
    verb = TABLES["operation"][call["operation"]]
    if verb == "barrier":
        return "barrier()"
    words = [TABLES["dtype"][call["dtype"]], f"{call['count']:,}"]
    if verb in REDUCING:
        words.append(TABLES["op"][call["op"]])
    if verb in ROOTED:
        words.append(f"root {call['peer']}")
    if verb in ("send", "recv"):
        whom = "anybody" if call["peer"] < 0 else f"rank {call['peer']}"
        words.append(f"{'to' if verb == 'send' else 'from'} {whom}, tag {call['tag']}")
    return f"{verb}({', '.join(words)})"


def bytes_of(call: Any) -> int:
    """The bytes that the call's count stands for."""
    bits = re.search("[0-9]+", TABLES["dtype"][call["dtype"]])
    return int(call["count"]) * (int(bits.group()) // 8 if bits else 1)
