"""The table of docs/dtypes.md, cell by cell."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
from on_ranks import on_ranks
from paths import ROOT

import pycomm
from pycomm import Group
from pycomm._core import DTYPES, REDUCE_OPS
from pycomm.errors import Unsupported

torch = pytest.importorskip("torch")

PAGE = ROOT / "docs" / "dtypes.md"
WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAN = {
    "float16": 0x7E00,
    "bfloat16": 0x7FC0,
    "float32": 0x7FC00000,
    "float64": 0x7FF8000000000000,
}


def table() -> dict[tuple[str, str], str]:
    """By op and dtype: the text of the page; "the same" repeats the cell before it."""
    rows = [
        line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if "|" in line
    ]
    head, cells = rows[0], {}
    assert head[0] == "op"
    for row in rows[2:]:
        for column in range(1, len(row)):
            if row[column] == "the same":
                row[column] = row[column - 1]
            for op, dtype in itertools.product(
                re.findall(r"`(\w+)`", row[0]), head[column].split(", ")
            ):
                assert (op, dtype) not in cells
                cells[op, dtype] = row[column]
    return cells


CELLS = table()


def folded(xs: list[Any], by: Callable[[Any, Any], Any]) -> Any:
    total = xs[0]
    for x in xs[1:]:
        total = by(total, x)
    return total


def in_float32(xs: list[Any], by: Callable[[Any, Any], Any]) -> Any:
    return folded([x.float() for x in xs], by)


def least(a: Any, b: Any) -> Any:
    """By IEEE's minimum: NaN wins, and -0 is less than 0."""
    below = (a < b) | ((a == b) & torch.signbit(a))
    return torch.where(a.isnan() | below, a, b)


def extreme(op: str, xs: list[Any]) -> Any:
    return folded(xs, least) if op == "min" else -folded([-x for x in xs], least)


BITS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
LOGIC = {"band": torch.logical_and, "bor": torch.logical_or, "bxor": torch.logical_xor}
TIMES = {"sum": torch.add, "product": torch.mul}

# Meaning of the words of a cell: from op and contributions to the result; None is Unsupported.
MEANING: dict[str, Callable[[str, list[Any]], Any] | None] = {
    "IEEE addition": lambda _, xs: folded(xs, torch.add),
    "IEEE multiplication": lambda _, xs: folded(xs, torch.mul),
    "added in float32, then rounded": lambda _, xs: in_float32(xs, torch.add).to(xs[0].dtype),
    "multiplied in float32, then rounded": lambda _, xs: in_float32(xs, torch.mul).to(xs[0].dtype),
    "sum, then one true division by the number of ranks": (
        lambda _, xs: folded(xs, torch.add) / len(xs)
    ),
    "sum in float32, one true division by the number of ranks, then rounded": (
        lambda _, xs: (in_float32(xs, torch.add) / len(xs)).to(xs[0].dtype)
    ),
    "NaN wins; -0 is less than 0": extreme,
    "wraps around": lambda op, xs: folded(xs, TIMES[op]),
    "the least": lambda _, xs: folded(xs, torch.minimum),
    "the largest": lambda _, xs: folded(xs, torch.maximum),
    "bit by bit": lambda op, xs: folded(xs, BITS[op]),
    "and, or, exclusive or": lambda op, xs: folded(xs, LOGIC[op]),
    "and": lambda _, xs: folded(xs, torch.logical_and),
    "or": lambda _, xs: folded(xs, torch.logical_or),
    "`Unsupported`": None,
}


def contributions(dtype: str, n: int) -> list[Any]:
    """One array per rank: pairs, or triples, of values that distinguish the possible results.

    Sums of three are exact in the accumulation type, so that their order does not matter.
    """
    kind = getattr(torch, dtype)
    if dtype == "bool":
        values = [0.0, 1.0]
    elif kind.is_floating_point and n == 2:
        values = [0.0, -0.0, 1.0, -1.5, 0.1, 3e4, 7e-8, 65504.0, float("inf"), float("-inf")]
        values += [float("nan"), 1 / 3, 2049.0, 257.0]
    elif kind.is_floating_point:
        values = [0.0, -0.0, 1.0, -3.0, 2048.0, 256.0, 5.0, float("nan")]
    else:
        limits = torch.iinfo(kind)
        values = [0, 1, 3, 7, 100, limits.max, limits.max - 1, limits.min, limits.min + 5]
    columns = zip(*itertools.product(values, repeat=n), strict=True)
    return [torch.tensor(column, dtype=kind) for column in columns]


def bits(x: Any, dtype: str) -> Any:
    """The elements' bits, with any NaN replaced by the one that the page names."""
    words = x.view(WORD[x.element_size()]).clone()
    if dtype in NAN:
        words[x.isnan()] = NAN[dtype]
    return words


def test_table_is_complete() -> None:
    assert set(CELLS) == set(itertools.product(REDUCE_OPS, DTYPES))
    assert set(CELLS.values()) == set(MEANING), "a cell without a meaning, or the reverse"


@on_ranks("n")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_cell_matches_the_behaviour(group: Group, dtype: str, n: int) -> None:
    each = contributions(dtype, n)
    for op in REDUCE_OPS:
        meaning = MEANING[CELLS[op, dtype]]
        x = each[group.rank].clone()
        if meaning is None:
            with pytest.raises(Unsupported, match=op):
                pycomm.all_reduce(x, op, group=group)
            assert torch.equal(bits(x, dtype), bits(each[group.rank], dtype))
            continue
        wanted = bits(meaning(op, each), dtype)
        pycomm.all_reduce(x, op, group=group)
        got = x.view(WORD[x.element_size()])
        assert torch.equal(got, wanted), f"{op}: {x[got != wanted]} of {torch.stack(each)}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_distinguish_one_rounding_from_several(dtype: str) -> None:
    each = contributions(dtype, 3)
    for op, by in TIMES.items():
        meaning = MEANING[CELLS[op, dtype]]
        assert meaning is not None
        once, often = meaning(op, each), folded(each, by)
        assert op == "product" or not torch.equal(bits(once, dtype), bits(often, dtype))
