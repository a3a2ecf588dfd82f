"""A part of the rows of a long table, another one each day: `make test-full` runs it, nightly all.

SAMPLE in the environment is the number of the day, which the Makefile sets and pytest prints.
`SAMPLE=20786 make test-full` repeats the rows of that day. Without it, all rows run.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def of_the_day(rows: Sequence[T], parts: int) -> list[T]:
    """Every `parts`th row: each row is among them once in `parts` consecutive days."""
    day = os.environ.get("SAMPLE", "")
    return [row for i, row in enumerate(rows) if not day or i % parts == int(day) % parts]


def day() -> int:
    """The number of the day, for tests that draw random cases; without SAMPLE 0."""
    return int(os.environ.get("SAMPLE", "") or 0)


def title() -> str:
    """A line for the head of a run."""
    day = os.environ.get("SAMPLE", "")
    return f"sample: SAMPLE={day} repeats its rows" if day else "sample: all rows"
