"""Figures of the pages come from the stored results, and pages stay short."""

import re
import sys
from pathlib import Path

from finished import finished
from paths import ROOT
from test_docs import FENCED, PAGES, anchor_of

from pycomm.bench.support import summaries

PERFORMANCE, TABLES = (
    ROOT / "docs" / name for name in ("performance.md", "internals/performance_tables.md")
)
README = ROOT / "README.md"
GENERATED = re.compile(r"<!-- (?:table|tests/).*?<!-- (?:end|to here) -->", re.DOTALL)
FIGURE = re.compile(r"(\d[\d,.]*)x?(?: to (\d[\d,.]*))?(?:x| %| times| us| ms| s)(?!\w)")
# Words of a page by hand; the reference and the generated tables do not count.
LIMITS = {"compression": 2_200}
LONGEST, ALL = 1_300, 25_000


def by_hand(page: Path) -> str:
    return GENERATED.sub("", page.read_text())


def test_generated_tables_match_the_stored_results() -> None:
    command = [sys.executable, str(ROOT / "tools" / "tables.py"), "--check"]
    done = finished(command)
    assert done.returncode == 0, done.stdout + done.stderr


def paragraphs() -> list[tuple[str, str]]:
    """Paragraphs and items of README and performance.md with figures, and the tables they link."""
    heads = re.split(r"^## (.*)$", TABLES.read_text(), flags=re.MULTILINE)[1:]
    tables = {anchor_of(head): text for head, text in zip(heads[::2], heads[1::2], strict=True)}
    found = []
    for page in (README, PERFORMANCE):
        text = re.sub(r"!\[.*?\]", "", FENCED.sub("", by_hand(page)))  # no code, no pictures
        named = dict(re.findall(r"^\[([\w-]+)\]: \S*performance_tables\.md#(\S+)$", text, re.M))
        for one in re.split(r"\n\n|\n(?=\* )", text):
            linked = [named[name] for name in re.findall(r"\]\[([\w-]+)\]", one)]
            if FIGURE.search(one):
                found.append((one, "".join(tables[anchor] for anchor in linked)))
    return found


def test_figures_are_in_the_tables_that_their_paragraph_links() -> None:
    assert len(paragraphs()) > 10
    for text, table in paragraphs():
        for figure in {number for pair in FIGURE.findall(text) for number in pair if number}:
            assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d.,]*\d)", table), (figure, text)


def rows(page: Path) -> dict[str, list[str]]:
    """The cells of the generated tables by the first."""
    lines = "".join(GENERATED.findall(page.read_text())).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    return {first: rest for first, *rest in cells}


def test_readme_and_performance_agree() -> None:
    shown, known = rows(README), rows(PERFORMANCE)
    for size in ("4 B", "1 MiB", "64 MiB"):
        gloo, pycomm, *_, ratio = known[size][:5]
        expected = [f"gloo {gloo} us", f"{pycomm} us", ratio]
        assert shown[f"all_reduce of {size}, `torch.distributed`"][:3] == expected
    _, gloo, _, wrapper, _, _, ratio = known["resnet"][:7]
    expected = [f"gloo under DDP {gloo} ms", f"`DataParallel` {wrapper} ms", ratio]
    assert shown["step of ResNet-18, small images"][:3] == expected


def test_readme_has_the_minutes_to_the_loss() -> None:
    stored = summaries.read(ROOT / "benchmarks" / "results" / "quality.json")["rows"]
    minutes = {row["method"]: row["seconds"] / 60 for row in stored if row["rate"] == "1gbit"}
    expected = "in {:.1f} minutes instead of {:.1f}"
    assert expected.format(minutes["adamw topk 200"], minutes["adamw"]) in README.read_text()


def test_pages_are_short() -> None:
    pages = [page for page in PAGES if page != TABLES and page.parent.name != "reference"]
    words = {page.stem: len(by_hand(page).split()) for page in pages}
    long = {name for name, count in words.items() if count > LIMITS.get(name, LONGEST)}
    assert long == set()
    assert sum(words.values()) <= ALL
