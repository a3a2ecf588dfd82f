"""`pycomm info --flight`: the ranks' last calls side by side, with late ranks and mismatched calls.

The core writes the records to PYCOMM_FLIGHT_RECORD when a group breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pycomm._tables import Table
from pycomm.observe import flight_recorder
from pycomm.observe.flight_recorder import FlightRecord

ROWS = 12  # of calls
COLUMNS = 8  # of ranks

# The position of a call, the same on all ranks: epoch, sequence, and COLLECTIVE. Messages before
# it, which involve two ranks only, are numbered from 0 instead.
Key: TypeAlias = tuple[int, int, int]
COLLECTIVE = 1 << 32


def report(paths: Sequence[str | Path]) -> str:
    """The report on the flight records in these files.

    Raises:
        InvalidArgument: a file is not a flight record; the text names it.
    """
    flight_records = [flight_recorder.read(path) for path in paths]
    return "\n\n".join(_group(group) for group in flight_recorder.groups_of(flight_records))


def facts(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """The records in these files, as JSON takes them: a dictionary for each, with its last calls.

    Raises:
        InvalidArgument: as report().
    """
    names = ("name", "size", "rank", "host", "pid", "reason")
    return [
        {name: getattr(one, name) for name in names}
        | {"calls": [_fact(call) for call in one.records[-ROWS:]]}
        for one in map(flight_recorder.read, paths)
    ]


def _fact(call: Any) -> dict[str, Any]:
    return {
        "epoch": int(call["epoch"]),
        "sequence": int(call["sequence"]),
        "call": flight_recorder.title(call),
        "outcome": flight_recorder.TABLES["outcome"][call["outcome"]],
        "seconds": max(int(call["ended"]) - int(call["begun"]), 0) / 1e9,
    }


def _group(ranks: list[FlightRecord]) -> str:
    calls = [_calls(one) for one in ranks]
    first = ranks[0]
    missing = sorted(set(range(first.size)) - {one.rank for one in ranks})
    lines = [f'group "{first.name}", {first.size} ranks, {len(ranks)} records']
    if missing:
        lines.append(f"  no record of ranks {', '.join(map(str, missing))}: killed, stuck or busy")
    lines += [
        f"  rank {one.rank} ({one.host}, pid {one.pid}): {one.reason or 'no error'}"
        for one in ranks
    ]
    lines += _behind(ranks, calls)
    shown = _most_telling(calls)
    if len(shown) < len(ranks):
        lines.append(f"  {len(shown)} ranks are shown, those that are behind first")
    return "\n".join([*lines, "", *_table([ranks[i] for i in shown], [calls[i] for i in shown])])


def _calls(one: FlightRecord) -> dict[Key, Any]:
    calls: dict[Key, Any] = {}
    messages = 0
    before: tuple[int, int] | None = None
    for call in one.records:
        when = int(call["epoch"]), int(call["sequence"])
        messages = messages if when == before else 0
        before = when
        if flight_recorder.TABLES["operation"][call["operation"]] in ("send", "recv"):
            calls[(*when, messages)] = call
            messages += 1
        else:
            calls[(*when, COLLECTIVE)] = call
    return calls


def _last(calls: dict[Key, Any]) -> Key:
    """The last collective that a rank called."""
    return max((key for key in calls if key[2] == COLLECTIVE), default=(-1, -1, 0))


def _behind(ranks: list[FlightRecord], calls: list[dict[Key, Any]]) -> list[str]:
    """Which ranks have not called what others have, and where ranks made different calls."""
    lasts = [_last(each) for each in calls]
    most = max(lasts)
    lines = []
    for one, last, each in zip(ranks, lasts, calls, strict=True):
        if last == most:
            continue
        shown = f"{_number(last)}, {flight_recorder.title(each[last])}" if last[0] >= 0 else "none"
        lines.append(f"  rank {one.rank} is behind: its last call is {shown}")
    for key in sorted(set().union(*calls)):
        titles = {flight_recorder.title(each[key]) for each in calls if key in each}
        if key[2] == COLLECTIVE and len(titles) > 1:
            lines.append(f"  ranks disagree about {_number(key)}: {', '.join(sorted(titles))}")
    return lines


def _number(key: Key) -> str:
    return f"call {key[1]}" + (f" of epoch {key[0]}" if key[0] else "")


def _most_telling(calls: list[dict[Key, Any]]) -> list[int]:
    """The ranks to show: those that are behind first, then in order."""
    behind = sorted(range(len(calls)), key=lambda i: (_last(calls[i]), i))
    return sorted(behind[:COLUMNS])


def _table(ranks: list[FlightRecord], calls: list[dict[Key, Any]]) -> list[str]:
    keys = sorted(set().union(*calls))[-ROWS:]
    shown = Table(dict.fromkeys(["call", "what", *(f"rank {one.rank}" for one in ranks)], ""))
    for key in keys:
        titles = {flight_recorder.title(each[key]) for each in calls if key in each}
        same = len(titles) == 1
        what = titles.pop() if same else "DISAGREE" if key[2] == COLLECTIVE else "messages"
        cells = [_cell(each, key, same) for each in calls]
        number = f"{key[0]}:{key[1]}" if key[0] else str(key[1])
        shown.add(number, what, *cells)
    return [f"  {line}" for line in str(shown).splitlines()]


def _cell(calls: dict[Key, Any], key: Key, same: bool) -> str:
    """A rank's state in a call: its duration, or how far the rank came."""
    call = calls.get(key)
    if call is None:
        if key[2] != COLLECTIVE:
            return ""
        return "before the record" if calls and key < min(calls) else "not called"
    outcome = flight_recorder.TABLES["outcome"][call["outcome"]]
    took = f"{(call['ended'] - call['begun']) / 1e6:.3f} ms"
    state = {"under way": "inside", "done": took, "failed": f"failed after {took}"}[outcome]
    return state if same else f"{flight_recorder.title(call)}: {state}"
