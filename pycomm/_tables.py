"""The tables of all commands.

    table = Table({"size": ">8", "time (us)": ".2f", "remark": ""}, "a title")
    table.add("64K", 1.25, "none")
    console().print(table)  # or table.flush(console()) after each row

Each heading has the format of its column, with a least width: "" or "<8" of text at the left, ">8"
of text at the right, ".2f" of numbers. On a narrow terminal the text of the last column is wrapped;
if that is not enough, optional columns are left out, and at last each row becomes a list of its
fields. Lines of a file have any length.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Collection, Mapping
from typing import Literal

from rich.box import Box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

UNLIMITED = 10_000  # characters of a line in a file
GAP = 2  # between two columns
LEAST_TEXT = 20  # of a last column that is wrapped


def console() -> Console:
    """The standard output. Nothing that it prints is markup."""
    width = shutil.get_terminal_size((UNLIMITED, 24)).columns
    return Console(width=width, markup=False, emoji=False, highlight=False)


class Table:
    """Columns, and rows that are added one by one."""

    def __init__(
        self,
        columns: Mapping[str, str],
        title: str = "",
        box: Box | None = None,
        headings: bool = True,
        optional: Collection[str] = (),
    ) -> None:
        self._title, self._box, self._headings = title, box, headings
        self._optional = optional
        self._columns = {name: _parsed(spec) for name, spec in columns.items()}
        self._rows: list[list[Text]] = []

    def add(self, *values: object) -> None:
        """Adds a row. None is shown as "-"; a Text keeps its style."""
        kinds = (kind for _, _, kind in self._columns.values())
        self._rows.append([_text(*pair) for pair in zip(values, kinds, strict=True)])

    def flush(self, to: Console) -> None:
        """Prints and drops the rows that were added since the last call; once with headings."""
        to.print(self)
        self._rows.clear()
        self._title, self._headings = "", False

    def __str__(self) -> str:
        """The text of a file."""
        return self._text(UNLIMITED)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield Text(self._text(width)) if self._box is None else self._fitting(width)

    def _text(self, width: int) -> str:
        """Without spaces at the ends of lines, and without styles."""
        file = io.StringIO()
        Console(file=file, width=width).print(self._fitting(width))
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def _fitting(self, width: int) -> Grid:
        every = list(range(len(self._columns)))
        needed = [i for i, name in enumerate(self._columns) if name not in self._optional]
        fits = next((one for one in (every, needed) if self._least_width(one) <= width), None)
        return self._lists() if fits is None else self._grid(fits)

    def _least_width(self, shown: list[int]) -> int:
        columns = list(self._columns.items())
        widths = [
            max([columns[i][1][1], len(columns[i][0]), *(row[i].cell_len for row in self._rows)])
            for i in shown
        ]
        if columns[-1][1][0] == "left":
            widths[-1] = min(widths[-1], LEAST_TEXT)
        # A box has a line and a space at both ends.
        return sum(widths) + (len(widths) - 1) * (GAP + bool(self._box)) + 4 * bool(self._box)

    def _grid(self, shown: list[int]) -> Grid:
        grid = Grid(
            title=Text(self._title) if self._title else None,
            title_justify="left",
            box=self._box,
            padding=(0, 1) if self._box else (0, GAP, 0, 0),
            pad_edge=self._box is not None,
            show_header=self._headings,
        )
        columns = list(self._columns.items())
        for i in shown:
            name, (side, width, _) = columns[i]
            wraps = side == "left" and i == len(columns) - 1
            least = max(width, len(name))
            grid.add_column(Text(name), justify=side, min_width=least, no_wrap=not wraps)
        for row in self._rows:
            grid.add_row(*(row[i] for i in shown))
        return grid

    def _lists(self) -> Grid:
        lists = Grid.grid(padding=(0, GAP, 0, 0))
        for row in self._rows:
            for name, text in zip(self._columns, row, strict=True):
                lists.add_row(Text(name), text)
            lists.add_row()
        return lists


def _parsed(spec: str) -> tuple[Literal["left", "right"], int, str]:
    """Side, least width, and the format of numbers."""
    found = re.fullmatch(r"([<>]?)(\d*)(.*)", spec)
    assert found is not None
    side, width, kind = found.groups()
    return "right" if kind or side == ">" else "left", int(width or 0), kind


def _text(value: object, kind: str) -> Text:
    if isinstance(value, Text):
        return value
    if value is None:
        return Text("-")
    return Text(value if isinstance(value, str) else format(value, kind))
