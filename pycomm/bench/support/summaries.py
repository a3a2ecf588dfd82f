"""The format of stored results: a median, a worst value and a count in place of samples.

A list of rows with the same fields is stored as {"columns": names, "rows": lists of values}, one
row a line, and read back as a list of dictionaries. Figures have nine significant digits, those of
a curve five.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PARTS = 20  # points of a stored curve
DIGITS = 9  # fewer change the last digit of a rounded figure in the tables
CURVE_DIGITS = 5  # of a list within a row, which is only drawn


def summarize(samples: Iterable[float]) -> dict[str, Any]:
    """Median, largest value and number of `samples`; None for the first two if there are none."""
    known = list(samples)
    if not known:
        return {"median": None, "worst": None, "count": 0}
    return {"median": statistics.median(known), "worst": max(known), "count": len(known)}


def ends(count: int) -> list[int]:
    """Where each of at most PARTS parts of a series of `count` values ends."""
    parts = min(PARTS, count)
    return [count * (part + 1) // parts for part in range(parts)]


def curve(values: Sequence[float]) -> list[float]:
    """The means of at most PARTS parts of a series."""
    at = ends(len(values))
    return [statistics.mean(values[i:j]) for i, j in zip([0, *at], at, strict=False)]


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Stores the results of one command; of its lists, a file *.csv has the rows alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            rows = _rounded(content["rows"])
            table = csv.DictWriter(file, list(rows[0]) if rows else [])
            table.writeheader()
            table.writerows(rows)
        return
    lines = [f"{json.dumps(name)}: {_text(value)}" for name, value in content.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def store(path: Path | None, **content: Any) -> None:
    """Stores results in `path`, if there is one, with the machine."""
    if path:
        from pycomm.bench.support import machine  # imports torch, which few processes need

        write(path, {"machine": machine.describe(), **content})


def read(path: Path) -> dict[str, Any]:
    """The results that write() stored, with rows as dictionaries."""
    stored: dict[str, Any] = json.loads(path.read_text())
    return {name: _rows(value) for name, value in stored.items()}


def _text(value: Any) -> str:
    if not (isinstance(value, list) and value and isinstance(value[0], dict)):
        return json.dumps(_rounded(value))
    columns = list(value[0])
    if any(list(row) != columns for row in value):
        raise ValueError(f"rows with different fields: {columns}")
    rows = (json.dumps(_rounded_row(row), separators=(",", ":")) for row in value)
    return f'{{"columns": {json.dumps(columns)}, "rows": [\n' + ",\n".join(rows) + "\n]}"


def _rows(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"columns", "rows"}:
        return [dict(zip(value["columns"], row, strict=True)) for row in value["rows"]]
    return value


def _rounded(value: Any, digits: int = DIGITS) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(one, digits) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one, digits) for one in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{digits}g}")
    return value


def _rounded_row(row: Mapping[str, Any]) -> list[Any]:
    return [
        _rounded(one, CURVE_DIGITS if isinstance(one, list) else DIGITS) for one in row.values()
    ]
