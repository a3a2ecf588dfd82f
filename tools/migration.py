"""Writes the tables of docs/migration.md from pycomm/_names.py.

python tools/migration.py          write them
python tools/migration.py --check  fail if the page differs
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pycomm._names import ROWS, Row  # noqa: E402 - the path of the repository comes first

PAGE = ROOT / "docs" / "migration.md"


def lines(rows: Iterable[Row]) -> str:
    """The rows of a table."""
    cells = ((row.theirs, row.ours, row.differences) for row in rows)
    return "".join(f"| {' | '.join(some)} |\n".replace("|  |", "| |") for some in cells)


def generated(page: str) -> str:
    """The page with the tables of ROWS: each is the first below the heading of its system."""
    for system, rows in ROWS.items():
        table = rf"(?m)(^## {system}\n(?:(?!## ).*\n)*?\|---\|---\|---\|\n)(?:\|.*\n)+"
        page, found = re.subn(table, lambda m, rows=rows: m[1] + lines(rows), page)
        if found != 1:
            raise SystemExit(f"{PAGE.name} has {found} tables for {system}")
    return page


def main() -> None:
    """See the head of this file."""
    old = PAGE.read_text()
    new = generated(old)
    if sys.argv[1:] == ["--check"] and new != old:
        raise SystemExit("docs/migration.md differs from pycomm/_names.py: tools/migration.py")
    PAGE.write_text(new)


if __name__ == "__main__":
    main()
