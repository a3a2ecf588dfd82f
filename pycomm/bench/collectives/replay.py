"""Replays traces: each rank issues the calls of its trace again, with the same operations, sizes,
dtypes and peers, as fast as it can.

A trace does not tell an all_gather_v from an all_gather of as many elements on each rank, or an
all_to_all of unequal parts from one of equal parts: both are replayed as the latter.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pycomm
from pycomm._tables import Table, console
from pycomm.bench.collectives.cases import Case
from pycomm.bench.collectives.verbs import Arrays, direct
from pycomm.bench.support import processes, summaries
from pycomm.errors import InvalidArgument
from pycomm.observe import flight_recorder

Times = dict[str, list[float]]
"""By title of a call: microseconds of each."""


def run(folder: Path, rounds: int, json: Path | None) -> int:
    """Replays the largest group of the traces; prints and stores; returns the exit status."""
    ranks = _traces(folder)
    recorded: Times = {}
    replayed: Times = {}
    totals: list[float] = []
    for call in (call for one in ranks for call in one.records):
        took_us = max(int(call["ended"]) - int(call["begun"]), 0) / 1e3
        recorded.setdefault(flight_recorder.title(call), []).append(took_us)

    def on_message(_: int, found: tuple[list[float], Times]) -> None:
        totals.extend(found[0])
        for title, times in found[1].items():
            replayed.setdefault(title, []).extend(times)

    processes.run(_work, ([one.records for one in ranks], rounds), len(ranks), on_message)
    settings = {"ranks": len(ranks), "rounds": rounds, "total_s": statistics.median(totals)}
    console().print(
        f'# group "{ranks[0].name}" of {folder}: {len(ranks)} ranks, {len(ranks[0].records)} '
        f"calls, replayed {rounds} times in {settings['total_s']:.4f} s",
        soft_wrap=True,
    )
    shown = Table({"call": "", "calls": ",", "recorded (us)": ",.2f", "replayed (us)": ",.2f"})
    rows = []
    for title, times in recorded.items():
        medians = statistics.median(times), statistics.median(replayed[title])
        shown.add(title, len(times), *medians)
        figures = {"recorded_us": medians[0], "replayed_us": medians[1]}
        rows.append({"call": title, "calls": len(times), **figures})
    console().print(shown)
    summaries.store(json, settings=settings, rows=rows)
    return 0


def _traces(folder: Path) -> list[flight_recorder.FlightRecord]:
    """The traces of all ranks of the group with the most calls.

    Raises:
        InvalidArgument: there are none, or a rank's is missing.
    """
    paths = sorted(folder.glob("*.trace")) if folder.is_dir() else [folder]
    groups = flight_recorder.groups_of(flight_recorder.read(path) for path in paths)
    if not groups:
        raise InvalidArgument(f"{folder} has no traces: run the program with PYCOMM_TRACE={folder}")
    group = max(groups, key=lambda ranks: (len(ranks), len(ranks[0].records), ranks[0].wall_ns))
    if len(group) != group[0].size or group[0].size < 2:
        raise InvalidArgument(
            f'{folder}: group "{group[0].name}" has {group[0].size} ranks and traces of '
            f"{len(group)}; expected those of all ranks, and at least 2"
        )
    return group


def _work(rank: processes.Rank, records: list[Any], rounds: int) -> None:
    """Reports the seconds of each round, and the times of calls."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "pycomm", store=rank.store, rank=rank.rank, world_size=rank.size
    )
    pycomm.init()
    calls = [(flight_recorder.title(one), _call(rank, one)) for one in records[rank.rank]]
    found: Times = {}
    totals: list[float] = []
    for turn in range(rounds + 1):
        pycomm.barrier()
        begin, works = time.perf_counter(), []
        for title, call in [*calls, ("", lambda: None)]:
            start = time.perf_counter()
            work = call()
            if isinstance(work, pycomm.Work):  # a message: its peer may be at an earlier call
                works.append(work)
            else:
                while works:
                    works.pop().wait()
            if turn > 0 and title:  # the first round warms up
                found.setdefault(title, []).append((time.perf_counter() - start) * 1e6)
        if turn > 0:
            totals.append(time.perf_counter() - begin)
    rank.send((totals, found))


def _call(rank: processes.Rank, one: Any) -> Callable[[], object]:
    """The call of a record."""
    verb, dtype, op = (
        flight_recorder.TABLES[name][one[name]] for name in ("operation", "dtype", "op")
    )
    count, peer, tag = (int(one[name]) for name in ("count", "peer", "tag"))
    message = verb in ("send", "recv")
    case = Case(
        "send_recv" if message else verb, dtype, 0, rank.size, 0 if message else max(peer, 0), op
    )
    size_bytes = count * case.itemsize * (1 if case.whole else rank.size)
    arrays = _arrays(dataclasses.replace(case, wanted_bytes=size_bytes), rank.rank)
    if verb == "send":
        return lambda: pycomm.send(arrays.input, peer, tag, async_op=True)
    if verb == "recv":
        return lambda: pycomm.recv(arrays.output, peer, tag, async_op=True)
    return direct(arrays)


@functools.cache
def _arrays(case: Case, rank: int) -> Arrays:
    """Those of all calls that are alike."""
    return Arrays(case, rank)
