"""The tables of the commands: columns, narrow terminals, and texts that look like markup."""

import io
import os

import pytest
from rich.box import ASCII2
from rich.console import Console

from pycomm._tables import Table, console

COLUMNS = {"size": ">8", "time (us)": ".2f", "ratio": ">", "remark": ""}


def made(remark: str) -> Table:
    table = Table(COLUMNS, "a [b] title")
    table.add("64K", 1.236, None, remark)
    table.add("1M", 100.0, "2.00x", "")
    return table


def shown(table: Table, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_columns_have_their_formats() -> None:
    assert str(made("[red]fine")).splitlines() == [
        "a [b] title",
        "    size  time (us)  ratio  remark",
        "     64K       1.24      -  [red]fine",
        "      1M     100.00  2.00x",
    ]


def test_a_narrow_terminal_wraps_the_last_column_and_then_shows_lists() -> None:
    lines = shown(made("ten words " * 10), 60)
    assert max(map(len, lines)) <= 60
    assert len(lines) == 7
    assert " ".join(line[28:] for line in lines[2:]).split() == ["ten", "words"] * 10
    assert shown(made("fine"), 30) == [
        *("size       64K", "time (us)  1.24", "ratio      -", "remark     fine", ""),
        *("size       1M", "time (us)  100.00", "ratio      2.00x", "remark", ""),
    ]


def test_rows_are_printed_one_by_one_under_one_heading(capsys: pytest.CaptureFixture[str]) -> None:
    table, to = Table(COLUMNS), console()
    for row in (("64K", 1.236, None, "first"), ("1M", 100.0, "2.00x", "second")):
        table.add(*row)
        table.flush(to)
    lines = capsys.readouterr().out.splitlines()
    assert [line[28:].strip() for line in lines] == ["remark", "first", "second"]


def test_a_file_has_lines_of_any_length_and_no_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", os.terminal_size)
    table = Table({"name": "", "value": ""}, box=ASCII2, headings=False)
    table.add("text", "[b]" + "x" * 500)
    console().print(table)
    top, row, bottom = capsys.readouterr().out.splitlines()
    assert row == f"| text | [b]{'x' * 500} |"
    assert top == bottom == f"+------+-{'-' * 503}-+"
