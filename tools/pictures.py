"""Draws the pictures of the pages, docs/pictures/*.svg: results from benchmarks/results, and what
the layers, a DGC step and a training step are.

    python tools/pictures.py          draw all
    python tools/pictures.py dgc step draw these
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from matplotlib.axes import Axes  # noqa: E402 - the path of the repository comes first
from matplotlib.patches import FancyBboxPatch  # noqa: E402 - as above

from benchmarks.reliability import elastic  # noqa: E402 - as above
from benchmarks.training import convergence, quality, received_bytes, steps  # noqa: E402 - as above
from pycomm import kernels  # noqa: E402 - as above
from pycomm.bench.collectives import measure, table  # noqa: E402 - as above
from pycomm.bench.support import plots, summaries  # noqa: E402 - as above
from pycomm.demo import report  # noqa: E402 - as above

RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
BOX, GRID, MUTED, INK = (plots.SHADES[name][0] for name in ("box", "grid", "muted", "text"))


def stored(name: str) -> tuple[dict[str, Any], str]:
    """A result, and a caption that names its machine."""
    found = summaries.read(RESULTS / f"{name}.json")
    of = found["machine"]
    where = f"{of['cpu']}, {of['cores']} processors, torch {of['torch']}, {of['date'][:10]}"
    return found, where


def all_reduce(path: Path) -> None:
    """The bandwidth beside other libraries."""
    found, where = stored("all_reduce_epyc")
    rows = [table.Line(**row) for row in found["rows"]]
    measure.draw(path, rows, found["settings"]["ranks"], where)


def demo(path: Path) -> None:
    """The demo's own plot."""
    found, where = stored("demo")
    rows = [report.Result(**row) for row in found["rows"]]
    report.save_plot(path, rows, found["settings"]["steps"], f"2 ranks of one host, {where}")


def convergence_by_bytes(path: Path) -> None:
    """The loss over the bytes."""
    found, where = stored("convergence")
    runs = [convergence.Run(**row) for row in found["rows"]]
    convergence.draw(path, runs, f"8 ranks, {where}")


def links_training(path: Path) -> None:
    """Seconds of a step by link and way."""
    found, where = stored("links_training")
    steps.draw(path, [steps.Row(**row) for row in found["rows"]], f"2 hosts, {where}")


def time_by_link(path: Path) -> None:
    """Minutes to a loss by link and method."""
    found, where = stored("quality")
    quality.draw(path, found["rows"], f"2 hosts, {where}")


def time_to_loss(path: Path) -> None:
    """The loss over the time of AdamW without and with TopK, at 1 Gbit/s."""
    found, where = stored("quality")
    names = "compression", "compression_longer"
    runs = [convergence.Run(**row) for name in names for row in stored(name)[0]["rows"]]
    methods = quality.REFERENCE, "adamw topk 200"
    chosen = {method: quality.shortest(runs, method) for method in methods}
    rows = [row for row in found["rows"] if row["rate"] == "1gbit" and row["method"] in methods]
    caption = f"AdamW; times are those of a gradient of 41 M elements on 2 hosts; {where}"
    quality.draw_curves(path, rows, chosen, caption)


def wire(path: Path) -> None:
    """Bytes that a rank receives."""
    found, _ = stored("wire")
    received_bytes.draw(path, found["ranks"], found["settings"]["elements"])


def replaced(path: Path) -> None:
    """The loss of a training whose ranks are killed."""
    found, where = stored("elastic")
    elastic.draw(path, found, f"4 ranks, a kill each 15 s, {where}")


# ---- what it is ----------------------------------------------------------------------------------


def _box(axes: Axes, place: tuple[float, float, float, float], text: str, shade: str = "") -> None:
    """A box at (x, y, width, height) with a line in bold, and more lines below."""
    x, y, width, height = place
    style: Any = {"boxstyle": "round,pad=0,rounding_size=0.08", "lw": 1.2}
    patch = FancyBboxPatch((x, y), width, height, fc=BOX, ec=shade or GRID, **style)
    axes.add_patch(patch)
    head, *rest = text.split("\n")
    gap = 0.27
    first = y + height / 2 - gap * len(rest) / 2
    middle: Any = {"ha": "center", "va": "center"}
    axes.text(x + width / 2, first, head, weight="bold", color=shade or INK, **middle)
    for i, line in enumerate(rest, 1):
        at = first + gap * i
        axes.text(x + width / 2, at, line, color=MUTED, fontsize=plots.TEXT - 1, **middle)


def layers(path: Path) -> None:
    """The folders, from the APIs down to the links."""
    rows = (  # of boxes: a text, and the method whose colour it has
        {"torch.distributed\nDDP, FSDP, vLLM, Ray": "gloo"}
        | {"import pycomm\nNumPy, CuPy, torch": "pycomm"},
        {'pycomm.torch_backend\nthe backend "pycomm",\nalso in place of gloo': ""}
        | {"pycomm/\nDataParallel, DGC, LocalSGD,\ncollectives, kernels": ""},
        {"csrc/group\nchecks that all ranks make one call, chooses a plan": ""},
        {"csrc/engine\nplans over links,\ndeadlines": ""}
        | {"csrc/shared\narrays in shared\nmemory": "", "csrc/device\nplans on GPU\nstreams": ""},
        {"transport\nshared memory,\nTCP": "pycomm", "kernels\nsums, top-k,\ncodes": "pycomm"}
        | {"NCCL\nloaded at\nrun time": "nccl"},
    )
    arrow: Any = {"arrowstyle": "-|>", "color": MUTED, "lw": 1}

    def panel(axes: Axes) -> None:
        axes.set(xlim=(0, 6), ylim=(5.3, 0))
        axes.axis("off")
        top = 0.0
        for boxes, below in itertools.zip_longest(rows, rows[1:], fillvalue={}):
            height, each = 0.34 + 0.28 * max(text.count("\n") for text in boxes), 6.2 / len(boxes)
            for i, (text, name) in enumerate(boxes.items()):
                shade = plots.color(name) if name else ""
                _box(axes, (each * i, top, each - 0.2, height), text, shade)
            count = max(len(boxes), len(below)) if below else 0
            for x in (6.2 * (i + 0.5) / count - 0.1 for i in range(count)):
                axes.annotate(
                    "", (x, top + height + 0.32), (x, top + height + 0.02), arrowprops=arrow
                )
            top += height + 0.33

    plots.save(path, {"": panel}, "Both APIs use one core, which checks each call", "", 5.0)


def dgc(path: Path) -> None:
    """A step of the real kernel on 48 elements: what is sent, and what is kept."""
    count, k = 48, 5
    random = np.random.default_rng(4)
    kept, gradient = (random.laplace(0, 1, count).astype(np.float32) for _ in range(2))
    kept = np.where(np.abs(kept) < 1.5, kept, 0.4 * kept)
    total, u, v = kept + gradient, np.zeros_like(kept), kept.copy()
    indices, values = kernels.dgc_step(gradient, u, v, k, momentum=0.0)
    sent, grey = plots.color("dgc"), plots.SHADES["bound"][0]
    most = 1.15 * np.abs(total).max()

    def panel(heights: Any, shades: Any) -> Callable[[Axes], None]:
        def draw(axes: Axes) -> None:
            axes.bar(range(count), heights, 0.75, color=shades)
            axes.axhline(0, color=GRID, lw=0.8)
            axes.set(xlim=(-1, count), ylim=(-most, most))
            axes.axis("off")

        return draw

    chosen = [sent if i in indices else grey for i in range(count)]
    message = np.zeros_like(total)
    message[indices] = values
    panels = {
        f"1. gradient + residual: {count} elements, the {k} largest selected": panel(total, chosen),
        f"2. sent: {k} indices and values": panel(message, sent),
        "3. kept: the residual, added to the next gradient": panel(v, grey),
    }
    plots.save(path, panels, "DGC sends the largest elements and delays the others", "", 1.25)


def step(path: Path) -> None:
    """The measured parts of a step over 1 Gbit/s: without overlap, with it, and with DGC."""
    found, where = stored("links_training")
    of = {row["way"]: row["step_s"] for row in found["rows"] if row["rate"] == "1gbit"}
    computed, exchanged = of["compute"], of["dense"] - of["compute"]
    starts = {
        "dense": ("dense, exchange after backward", computed),
        "overlap": ("dense, exchange during backward", of["overlap"] - exchanged),
        "dgc": ("DGC 99.9 %", computed),
    }

    def panel(axes: Axes) -> None:
        for i, (way, (name, start)) in enumerate(starts.items()):
            y, shade = 1.5 * i, plots.color("dgc" if way == "dgc" else "pycomm")
            axes.text(0, y - 0.28, f"{name}: {of[way]:.2f} s", weight="bold", va="bottom")
            axes.barh(y, computed, 0.36, color=plots.SHADES["bound"][0])
            axes.barh(y + 0.42, of[way] - start, 0.36, left=start, color=shade)
            words: Any = {"va": "center", "color": MUTED, "fontsize": plots.TEXT - 1}
            axes.text(computed + 0.02, y, "computation", **words)
            axes.text(of[way] + 0.02, y + 0.42, "exchange", **words)
        axes.set(xlabel="seconds", xlim=(0, 1.18 * of["dense"]), ylim=(3.9, -0.75))
        axes.spines["left"].set_visible(False)
        axes.set_yticks([])

    hidden = (of["dense"] - of["overlap"]) / exchanged
    saved = (of["dense"] - of["dgc"]) / exchanged
    title = f"Over 1 Gbit/s, overlap hides {100 * hidden:.0f} % of the exchange; DGC avoids "
    title += f"{100 * saved:.0f} %"
    caption = f"41 M gradient elements, 2 hosts; {where}"
    plots.save(path, {"": panel}, title, caption, 3.2)


DRAWN: dict[str, Callable[[Path], None]] = {
    one.__name__: one
    for one in (
        *(all_reduce, demo, convergence_by_bytes, links_training, time_by_link, time_to_loss),
        *(wire, replaced, layers, dgc, step),
    )
}


def texts(path: Path) -> list[str]:
    """The texts of a picture, which all versions of matplotlib write equally."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def main(names: Sequence[str]) -> int:
    """Draws pictures."""
    if unknown := [name for name in names if name not in DRAWN]:
        print(f"pictures.py: invalid name: got {unknown[0]}, expected one of {', '.join(DRAWN)}")
        return 2
    PICTURES.mkdir(exist_ok=True)
    for name in names or DRAWN:
        DRAWN[name](PICTURES / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
