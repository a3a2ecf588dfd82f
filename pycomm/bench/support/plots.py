"""The plots of the demo and the benchmarks: panels in one style. Needs matplotlib.

A method has one colour in all plots (COLORS), and a label at its line or bar instead of a legend.
The title states what the data show. A file `*.svg` has a second form for dark pages: its own style
sheet replaces each colour of COLORS and SHADES, so one file suits both, also as an image in a page.
"""

from __future__ import annotations

import functools
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from pycomm.bench.support.sizes import format_size

# On a light page and on a dark one. Each colour is in one place only.
SHADES = {
    "page": ("#ffffff", "#0d1117"),
    "box": ("#f1f4f7", "#1c2230"),
    "grid": ("#d8dee4", "#30363d"),
    "bound": ("#afb8c1", "#6e7681"),
    "muted": ("#59636e", "#9198a1"),
    "text": ("#1f2328", "#e6edf3"),
    "limit": ("#cf222e", "#ff7b72"),
}
# By a pattern of the method's name. The first that is found applies.
COLORS = {
    "top-?k": ("#8250df", "#bc8cff"),
    "quantize": ("#bf3989", "#f778ba"),
    "dgc|sparse|compact|shard|gather|fused|auto_time": ("#d4690b", "#f0883e"),
    "local": ("#1a7f37", "#3fb950"),
    "soap|muon": ("#9a6700", "#d29922"),
    "nccl": ("#5a7d00", "#a5c74c"),
    "mpi": ("#7a4b21", "#c69c6d"),
    "deepspeed|vllm": ("#0f766e", "#2dd4bf"),
    "gloo|torch|eager": ("#7d8590", "#8b949e"),
    "fake|alone|compute": SHADES["bound"],
    "direct|wrapper": ("#54aeff", "#1f6feb"),
    "pycomm.empty|shared": ("#0550ae", "#a5d6ff"),
    "": ("#0969da", "#58a6ff"),  # pycomm, dense
}
DASHES = {
    "open mpi": ":",
    "openmpi": ":",
    "intel": "--",
    "without": "--",
    "soap, ": "--",
    "adamw dense": "--",
}
LABELS = {"pycomm": "pycomm, torch", "pycomm-direct": "pycomm, direct"}
LABELS |= {"pycomm-shared": "pycomm.empty", "pycomm-encrypted": "pycomm, encrypted"}
LABELS |= {"mpich": "MPICH", "intelmpi": "Intel MPI", "openmpi": "Open MPI", "vllm": "vLLM"}
LABELS |= {"deepspeed": "DeepSpeed", "fake": "torch alone", "wrapper": "pycomm.DataParallel"}
LABELS |= {"compute": "computation alone", "overlap": "dense, overlap", "dgc": "DGC 99.9 %"}
LABELS |= {
    "fused": "DGC, fused",
    "compact": "DGC, compact",
    "local": "LocalSGD",
    "auto_time": "DGC, auto_time",
}
LABELS |= {f"pycomm {name}": name for name in ("DGC 99.9 %", "LocalSGD")}
LABELS |= {"adamw": "AdamW", "topk": "TopK(200)", "quantize": "Quantize(3, 8)"}
LIMIT: Any = {"ls": "--", "lw": 1, "color": SHADES["limit"][0]}
TEXT = 10.0  # points; a plot is 6 inches wide, so that a phone shows 9 pixels
WIDTH = 6.2
FONTS = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"
MUTED, GRID, INK = (SHADES[name][0] for name in ("muted", "grid", "text"))
STYLE: Any = {
    "font.size": TEXT,
    "axes.titlesize": TEXT,
    "axes.titlelocation": "left",
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": SHADES["page"][0],
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "svg.fonttype": "none",  # text as text: small, and found by a search
    "svg.hashsalt": "pycomm",  # equal data give equal files
}

Panel = Callable[[Axes], object]
Row = TypeVar("Row")


def rate(name: str) -> str:
    """The name of a link: "1 Gbit/s" for "1gbit"."""
    found = re.fullmatch(r"(\d+)([mg])bit", name)
    return f"{found[1]} {found[2].upper()}bit/s" if found else "unlimited"


def color(name: str) -> str:
    """The colour of a method on a light page."""
    return next(both[0] for word, both in COLORS.items() if re.search(word, name.lower()))


def style(name: str) -> dict[str, Any]:
    """The settings of a method's line: its label, colour and dashes."""
    shown = LABELS.get(name, name)
    dashes = next((one for word, one in DASHES.items() if word in shown.lower()), "-")
    return {"label": shown, "color": color(name), "ls": dashes}


def save(
    path: Path,
    panels: Mapping[str, Panel],
    title: str,
    caption: str = "",
    height: float = 2.6,
    columns: int = 1,
) -> None:
    """Draws a panel of `height` inches for each name, under a title that states the conclusion, and
    over a caption. The format follows the suffix of `path`."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(STYLE):
        heading = textwrap.fill(title, 52)
        tall = height * rows + 0.25 * (2 + heading.count("\n"))
        figure = Figure(figsize=(WIDTH, tall), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flat
        for axes, panel in itertools.zip_longest(grid, panels.items()):
            if panel is None:
                axes.set_visible(False)
                continue
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(panel[0])
            panel[1](axes)
        left: Any = {"x": 0.01, "ha": "left"}
        figure.suptitle(heading, fontsize=TEXT + 2, weight="bold", **left)
        figure.supxlabel(textwrap.fill(caption, 90), fontsize=TEXT - 2, color=MUTED, **left)
        svg = path.suffix == ".svg"
        figure.savefig(path, dpi=150, metadata={"Date": None} if svg else None)
    if svg:
        path.write_text(_with_dark_form(path.read_text(), title))


def _with_dark_form(svg: str, title: str) -> str:
    """An SVG with the rules for dark pages, the fonts of the page's system, and its title."""
    rules = [
        f'[style*="{part}: {light}"]{{{part}:{dark} !important}}'
        for light, dark in dict([*SHADES.values(), *COLORS.values()]).items()
        for part in ("fill", "stroke")
        if f"{part}: {light}" in svg
    ]
    sheet = f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"
    svg = re.sub(r"(font: [^;\"]*?[\d.]+px)[^;\"]*", rf"\1 {FONTS}", svg)
    svg = re.sub(r"<!DOCTYPE.*?>\n|<!--.*?-->\n| *<metadata>.*?</metadata>\n", "", svg, flags=re.S)
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="860"', svg, count=1)
    svg = re.sub(r"\n +", "\n", svg)
    # A tenth of a point is enough. Texts keep their digits.
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d\.\d)\d+", r"\1", tag[0]), svg)
    return re.sub(r"<svg [^>]*>\n", rf"\g<0><title>{title}</title>\n{sheet}\n", svg, count=1)


def grouped(
    rows: Iterable[Row],
    title: Callable[[Row], str],
    draw: Callable[[Sequence[Row], Axes], object],
) -> dict[str, Panel]:
    """A panel for each title, which draws the rows that have it."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(title(row), []).append(row)
    return {name: functools.partial(draw, own) for name, own in groups.items()}


def lines(axes: Axes, rows: Iterable[Any], fields: Sequence[str], **settings: Any) -> None:
    """A line for each value of the first field: the third over the second. A second row with one
    value and one x is left out. The settings are those of Axes.set()."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        name, x, y = (getattr(row, field) for field in fields)
        found.setdefault(name, {}).setdefault(x, y)
    for name in sorted(found, key=lambda name: name.startswith("pycomm")):  # ours in front
        x, y = zip(*found[name].items(), strict=True)
        axes.plot(x, y, marker="o", ms=3, lw=1.5, **style(name))
    axes.set(**settings)
    axes.grid()
    label_lines(axes)


def label_lines(axes: Axes, below: bool = False) -> None:
    """Writes the label of each line right of its last point. A label that would cover another one
    is moved, and a thin line leads to it. `below`: those of lines that end in the middle are below
    all lines, where this makes space. Call it last: limits must be final."""
    axes.autoscale_view()
    figure: Any = axes.figure
    place: Any = axes.get_subplotspec()
    grid, (width, height) = place.get_gridspec(), figure.get_size_inches()
    em = TEXT / 72 / 0.72  # inches, on axes that are about 0.72 of their part of the figure
    high, wide = 1.15 * em * grid.nrows / height, 0.5 * em * grid.ncols / width
    to_axes = axes.transScale + axes.transLimits
    found: list[list[Any]] = []  # the left end, the middle, the width, and the line
    under: list[list[Any]] = []  # the same, with the right end
    for line in axes.get_lines():
        text, points = str(line.get_label()), np.asarray(line.get_xydata())
        if not text.startswith("_") and len(points):
            x, own = to_axes.transform(points[-1])[0], wide * (len(text) + 1)
            middle = below and x <= 0.75
            (under if middle else found).append([1.0 if x > 0.75 else x, 0.0, own, line])
    if under:
        ticks, (low, top), share = axes.get_yticks(), axes.get_ylim(), high * (len(under) + 0.5)
        axes.set_ylim(low - share / (1 - share) * (top - low), top)
        axes.set_yticks([tick for tick in ticks if low <= tick <= top])
    for label in found:
        label[1] = min(max(to_axes.transform(label[3].get_xydata()[-1])[1], 0.0), 1.0)
    found.sort(key=lambda label: label[1])
    for _ in range(300):
        for lower, upper in itertools.combinations(found, 2):
            overlap = high - (upper[1] - lower[1])
            if overlap > 0 and lower[0] < upper[0] + upper[2] and upper[0] < lower[0] + lower[2]:
                lower[1] -= overlap / 2
                upper[1] += overlap / 2
    # The leftmost on top, left of its thin line, so that none covers a line.
    for i, label in enumerate(sorted(under, key=lambda label: -label[0])):
        label[:2] = max(label[0], 1.15 * label[2]), high * (i + 0.5)
    for x, y, own, line in found + under:
        shade, last = line.get_color(), line.get_xydata()[-1]
        left = [x, y, own, line] in under
        moved = left or abs(y - to_axes.transform(last)[1]) > high / 2
        lead: Any = {"arrowstyle": "-", "lw": 0.6, "color": shade, "shrinkA": 0}
        lead["relpos"] = (1.0, 0.5) if left else (0.0, 0.5)
        axes.annotate(
            str(line.get_label()),
            last,
            (x - 0.008 if left else x + 0.03, y),
            textcoords="axes fraction",
            ha="right" if left else "left",
            va="center",
            color=shade,
            annotation_clip=False,
            arrowprops=lead if moved else None,
        )


def byte_ticks(axes: Axes, sizes: Iterable[int]) -> None:
    """Labels these numbers of bytes on the axis of x, which becomes logarithmic."""
    axes.set(xscale="log", xlabel="bytes")
    axes.set_xticks(sorted(set(sizes)), minor=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_size(max(1, int(x)))))
    axes.minorticks_off()


def bars(axes: Axes, lengths: Mapping[str, float], labels: Sequence[str]) -> None:
    """A horizontal bar for each method, the first on top, with its label at its end."""
    names = [LABELS.get(name, name) for name in lengths]
    drawn = axes.barh(names, list(lengths.values()), 0.72, color=list(map(color, lengths)))
    axes.bar_label(drawn, labels, padding=3)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.margins(x=0.16)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
