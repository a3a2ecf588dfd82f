"""The pictures of the pages show the stored results, in the colours of one table."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from test_docs import PAGES

from pycomm.bench.support import plots
from tools import pictures

COLOR = re.compile(r"(?:fill|stroke): (#\w{6})")
LIMIT = 300_000  # bytes of all pictures


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_picture_shows_the_stored_results(name: str, tmp_path: Path) -> None:
    pictures.DRAWN[name](tmp_path / "drawn.svg")
    stored = pictures.PICTURES / f"{name}.svg"
    assert pictures.texts(stored) == pictures.texts(tmp_path / "drawn.svg")


def test_each_color_has_a_dark_form() -> None:
    pairs = dict([*plots.SHADES.values(), *plots.COLORS.values()])
    for path in pictures.PICTURES.glob("*.svg"):
        _, sheet, drawn = path.read_text().partition("</style>")
        assert sheet, path.name
        assert set(COLOR.findall(drawn)) - set(pairs) == set(), path.name


def test_each_picture_is_small_and_shown_in_a_page() -> None:
    there = {path.name: path.stat().st_size for path in pictures.PICTURES.iterdir()}
    assert set(there) == {f"{name}.svg" for name in pictures.DRAWN}
    shown = "".join(page.read_text() for page in PAGES)
    assert [name for name in there if f"pictures/{name}" not in shown] == []
    assert sum(there.values()) < LIMIT


def test_a_method_has_one_color() -> None:
    same = (["DGC 99.9 %", "pycomm DGC 99.9 %", "dgc", "fused"], ["TopK(200)", "AdamW TopK 200"])
    same += (["local", "pycomm LocalSGD"], ["gloo", "gloo dense"], ["mpich", "Intel MPI"])
    same += (["pycomm", "pycomm dense", "overlap", "AdamW dense"], ["quantize", "Quantize(3, 8)"])
    colors = [{plots.color(name) for name in names} for names in same]
    assert [len(found) for found in colors] == [1] * len(same)
    assert len(set.union(*colors)) == len(same)


def test_lines_have_one_point_for_each_x_and_labels_that_do_not_overlap() -> None:
    """Also if a peer was measured several times, as beside several MPIs."""
    axes = Figure().subplots()
    peers = "pycomm", "gloo", "mpich", "openmpi"
    rows = [SimpleNamespace(peer=p, x=x, y=x) for p in peers for x in (1, 2, 3)] * 2
    plots.lines(axes, rows, ("peer", "x", "y"))
    assert [len(line.get_xdata()) for line in axes.get_lines()] == [3] * 4
    heights = sorted(text.xyann[1] for text in axes.texts)
    assert [text.get_text() for text in axes.texts][-1] == "pycomm, torch"
    assert all(high - low > 0.03 for low, high in itertools.pairwise(heights))


def test_labels_below_are_left_of_their_thin_lines_and_cover_none() -> None:
    """The loss over bytes: of methods that end in the middle, each label has a row of its own."""
    axes, ends = Figure().subplots(), {"TopK": 3, "DGC": 6, "local": 7, "dense": 10}
    for name, end in ends.items():
        axes.plot([0, end], [3, 1], **plots.style(name))
    plots.label_lines(axes, below=True)
    placed = {text.get_text(): (*text.xyann, text.get_ha()) for text in axes.texts}
    assert placed["dense"][0] > 1
    below = [placed[name] for name in ("TopK", "DGC", "LocalSGD")]
    assert [alignment for *_, alignment in below] == ["right"] * 3
    assert all(a[0] < b[0] and a[1] > b[1] + 0.03 for a, b in itertools.pairwise(below))
    bottom = axes.transAxes.inverted().transform(axes.transData.transform((0, 1)))[1]
    assert below[0][1] < bottom
