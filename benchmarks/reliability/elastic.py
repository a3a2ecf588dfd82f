"""`python -m benchmarks elastic`: killed ranks are replaced, and training continues.

First, ranks with a state of several sizes make one call after another. One of them is killed, and a
process that is up already takes its place. The table has the time from that process's join() to its
first step (join_ms), and from the kill to the first step of each rank that survived (idle_ms), as
medians and worst values.

Then, with --minutes, ranks train with and without kills, in turn. A rank is killed every 15 s, at a
random moment. New processes start after the kill ("after the kill"), before it ("before the kill"),
or are forked from a process that has imported the libraries ("forked"). Each builds its model and
optimizer before it joins. Every 50 steps the parameters of all ranks must be bitwise equal to those
without kills. `steps` is the number of steps of the run. `share` is this number divided by that of
the run without kills, and `share_without_start` leaves out the time that no process was there to
take the place (waited_s). idle_s is the time from the kills to the next step of all ranks.
"""

from __future__ import annotations

import functools
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.reliability.elastic_ranks import LIMIT_S, Ranks, Steps, Training
from benchmarks.support import command
from pycomm.bench.support import plots, summaries

INTERVAL_S = 15.0
TRAINING_RANKS = 4
FORM_S = 1.0  # added to the length of a run: the ranks form their group in it
NO_KILLS = "no kills"
STARTS = {
    "after the kill": ("spawn", False),
    "before the kill": ("spawn", True),
    "forked": ("forkserver", False),
}


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns 1 if the parameters of two ranks or two runs differ."""
    counts: dict[str, Any] = {"ranks": (8, ""), "rounds": (50, "kills for each size")}
    counts |= {"minutes": (0.0, "of each training"), "interval": (INTERVAL_S, "seconds")}
    parser = command.parser("elastic", __doc__, **counts)
    sizes_mb = [1, 100, 1000]
    parser.add_argument("--state-mb", nargs="+", type=int, default=sizes_mb, help="(%(default)s)")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS), help="(all)")
    options = parser.parse_args(argv)
    sizes = options.state_mb if options.rounds else []
    replaced = [replacements(options.ranks, mb, options.rounds) for mb in sizes]
    content: dict[str, Any] = {"replacements": replaced} if replaced else {}
    status = 0
    if options.minutes:
        kinds = [NO_KILLS, *options.starts]
        runs = [training(kind, options.minutes * 60, options.interval) for kind in kinds]
        content["training"], equal = compared(runs)
        status = 0 if equal else 1
        content["loss"] = [
            {"run": run["kind"], "kills": run["kills_at"], "losses": summaries.curve(run["losses"])}
            for run in runs
        ]
    command.report(options.json, **content)
    return status


def replacements(size: int, state_mb: int, rounds: int) -> dict[str, Any]:
    """Kills a rank `rounds` times, and lets another process take its place."""
    choose, joins, idles = random.Random(state_mb), [], []
    body = functools.partial(Steps, state_mb * 10**6)
    with (
        tempfile.TemporaryDirectory() as folder,
        Ranks(f"{folder}/group", size, "forkserver", True, body) as ranks,
    ):
        ranks.form()
        ranks.answers("step")
        for _ in command.progress(range(rounds), f"{state_mb} MB"):
            victim = choose.randrange(size)
            killed_s = ranks.replace(victim)
            begin_s, _ = ranks.joined(victim)
            for rank, done_s in ranks.answers("step").items():
                if rank == victim:
                    joins.append(1e3 * (done_s - begin_s))
                else:
                    idles.append(1e3 * (done_s - killed_s))
            ranks.prepare()
    times = command.median_and_worst("join", joins) | command.median_and_worst("idle", idles)
    return {"ranks": size, "state_mb": state_mb, "kills": rounds, **times}


def training(kind: str, seconds: float, interval_s: float) -> dict[str, Any]:
    """One run: its steps, the checksums and losses by step, and the steps of the kills."""
    start, ready = STARTS.get(kind, ("spawn", False))
    choose = random.Random(0)
    marks: dict[int, set[int]] = {}
    losses: dict[int, float] = {}
    ended: list[int] = []
    kills_at: list[int] = []
    idle_s: dict[float, float] = {}  # by the moment of the kill
    with (
        tempfile.TemporaryDirectory() as folder,
        Ranks(f"{folder}/group", TRAINING_RANKS, start, ready, Training) as ranks,
        command.bar() as bar,
    ):
        end_s = time.monotonic() + FORM_S + seconds
        ranks.form(end_s)
        begin_s = max(ranks.joined(rank)[1] for rank in range(TRAINING_RANKS))
        shown = bar.add_task(kind, total=end_s - begin_s)

        def read_until(moment_s: float) -> None:
            for _, found, value in ranks.poll(moment_s):
                if found == "mark":
                    step, checksum, loss = value
                    marks.setdefault(step, set()).add(checksum)
                    losses[step] = loss
                    bar.update(shown, completed=time.monotonic() - begin_s)
                elif found == "step":
                    killed_s = max(moment for moment in idle_s if moment <= value)
                    idle_s[killed_s] = max(idle_s[killed_s], value - killed_s)
                elif found == "end":
                    ended.append(value)

        kills = 0 if kind == NO_KILLS else int((end_s - begin_s) // interval_s)
        for number in range(kills):
            read_until(begin_s + (number + choose.uniform(0.1, 0.6)) * interval_s)
            kills_at.append(max(marks, default=0))
            idle_s[ranks.replace(choose.randrange(TRAINING_RANKS), end_s)] = 0.0
            ranks.prepare()
        read_until(end_s + LIMIT_S)
    if ended != TRAINING_RANKS * ended[:1]:
        raise RuntimeError(f"ranks ended after different steps: {ended}")
    return {
        "kind": kind,
        "seconds": end_s - begin_s,
        "steps": ended[0],
        "waited_s": ranks.waited_s,
        "idle_s": sum(idle_s.values()),
        "marks": marks,
        "losses": [losses[step] for step in sorted(losses)],
        "kills_at": kills_at,
    }


def compared(runs: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """A row for each run, and whether all have the parameters of the first run."""
    first, rows, all_equal = runs[0], [], True
    for run in runs:
        common = run["marks"].keys() & first["marks"].keys()
        equal = bool(common) and all(
            run["marks"][step] | first["marks"][step] == {min(first["marks"][step])}
            for step in common
        )
        share = run["steps"] / run["seconds"] * first["seconds"] / first["steps"]
        rows.append(
            {
                "start": run["kind"],
                "ranks": TRAINING_RANKS,
                "seconds": run["seconds"],
                "kills": len(run["kills_at"]),
                "steps": run["steps"],
                "share": share,
                "idle_s": run["idle_s"],
                "waited_s": run["waited_s"],
                "share_without_start": share * run["seconds"] / (run["seconds"] - run["waited_s"]),
                "compared": len(common),
                "bitwise_equal": equal,
            }
        )
        all_equal &= equal
    return rows, all_equal


def draw(path: Path, content: dict[str, Any], caption: str) -> None:
    """The loss over the steps of the run without kills and of a run with kills."""
    quiet, killed = content["training"][:2]

    def panel(axes: Axes) -> None:
        for run, row in zip(content["loss"], (quiet, killed), strict=False):
            name = f"{row['kills']} killed" if row["kills"] else NO_KILLS
            shade, width = (plots.MUTED, 5.0) if row is quiet else (plots.color("pycomm"), 1.5)
            each = row["steps"] / 1e3 / max(1, len(run["losses"]))
            at = [each * (part + 1) for part in range(len(run["losses"]))]
            axes.plot(at, run["losses"], label=name, color=shade, lw=width)
            ground = axes.get_xaxis_transform()
            kills = [step / 1e3 for step in run["kills"]]
            marks: Any = {"ls": "", "marker": "|", "ms": 9, "color": plots.LIMIT["color"]}
            axes.plot(kills, [0.02] * len(kills), transform=ground, label="_", **marks)
        axes.set(xlabel="1,000 steps; a red mark is a killed rank", ylabel="loss", yscale="log")
        axes.grid()
        plots.label_lines(axes)

    equal = "bitwise equal to" if killed["bitwise_equal"] else "other than"
    title = (
        f"{killed['kills']} ranks killed and replaced: the parameters are {equal} those of a run "
    )
    title += "without kills"
    plots.save(path, {"": panel}, title, caption)
