"""Parses lists of command lines: names; sizes such as "4", "64K", "1.5M", "4:64M:4", "4,1K,1M"."""

from __future__ import annotations

import fnmatch
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of an argument that is a list of such names or patterns like "adamw*", by comma."""
    listed = list(known)

    def parse(text: str) -> list[str]:
        chosen: list[str] = []
        for pattern in filter(None, map(str.strip, text.split(","))):
            found = fnmatch.filter(listed, pattern)
            if not found:
                raise ArgumentTypeError(f"{pattern!r} is not among {', '.join(listed)}")
            chosen += [name for name in found if name not in chosen]
        return chosen

    return parse


def parse_size(text: str) -> int:
    """Bytes; units are powers of 1024. ArgumentTypeError if not whole bytes, at least 1."""
    number, unit = text.strip().upper().removesuffix("B"), ""
    if number and number[-1] in UNITS:
        number, unit = number[:-1], number[-1]
    try:
        value = float(number) * UNITS[unit]
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no size: write 4, 64K or 1M") from None
    if value < 1 or value != int(value):
        raise ArgumentTypeError(f"{text!r} is no size: it must be whole bytes, at least 1")
    return int(value)


def parse_sizes(text: str) -> list[int]:
    """A list by comma; first:last doubles each time, first:last:factor multiplies by factor."""
    sizes: list[int] = []
    for part in text.split(","):
        first, *rest = part.split(":")
        if len(rest) > 2:
            raise ArgumentTypeError(f"{part!r} is no range: write first:last or first:last:factor")
        size = parse_size(first)
        last = parse_size(rest[0]) if rest else size
        factor = int(rest[1]) if len(rest) == 2 else 2
        if factor < 2 or last < size:
            raise ArgumentTypeError(f"{part!r} is no range: it must grow, by at least 2")
        sizes += series(size, last, factor)
    return sizes


def series(first: int, last: int, factor: int, step: int = 0) -> list[int]:
    """From `first` to at most `last`, each `step` more than the one before, or `factor` times."""
    found = [first]
    while (size := found[-1] + step if step else found[-1] * factor) <= last:
        found.append(size)
    return found


def format_size(count_bytes: int) -> str:
    """The shortest of these spellings that says `count_bytes` exactly."""
    for unit in "GMK":
        if count_bytes % UNITS[unit] == 0:
            return f"{count_bytes // UNITS[unit]}{unit}"
    return str(count_bytes)
