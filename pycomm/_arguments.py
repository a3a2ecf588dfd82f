"""Checks of arguments before a call: one form of the errors, *invalid X: got V, expected R*."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any, NoReturn

from pycomm.errors import InvalidArgument

__all__ = [
    "flag",
    "instance",
    "integer",
    "integers",
    "number",
    "one_of",
    "positive",
    "refuse",
    "seconds",
    "shown",
]

PLAIN = (type(None), bool, int, float, str, bytes)


def shown(value: Any) -> str:
    """A value of a plain type as text, else the type: other texts may be long, or raise."""
    return f"{value!r:.60}" if type(value) in PLAIN else type(value).__name__


def refuse(name: str, value: Any, expected: str) -> NoReturn:
    """Raises InvalidArgument for the argument `name`."""
    raise InvalidArgument(f"invalid {name}: got {shown(value)}, expected {expected}")


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """An integer of Python or NumPy, not a bool, from `least` to `most`."""
    try:
        found = operator.index(value)
    except (TypeError, ValueError):  # not an integer
        refuse(name, value, _integers(least, most))
    fits = (least is None or found >= least) and (most is None or found <= most)
    if not fits or value is True or value is False:
        refuse(name, value, _integers(least, most))
    return found


def _integers(least: int | None, most: int | None) -> str:
    if least is None:
        return "an integer"
    return f"an integer from {least}" if most is None else f"an integer in {least}..{most}"


def integers(name: str, value: Any, least: int | None = None, most: int | None = None) -> list[int]:
    """A sequence of integers as a list, each as of integer()."""
    try:
        found = [operator.index(one) for one in value]
    except (TypeError, ValueError, RuntimeError):  # no sequence, or an element is no integer
        refuse(name, value, "a list of integers")
    if isinstance(value, (str, bytes)):
        refuse(name, value, "a list of integers")
    for i, one in enumerate(found):
        if (least is not None and one < least) or (most is not None and one > most):
            refuse(f"{name}[{i}]", one, _integers(least, most))
    return found


def number(name: str, value: Any) -> float:
    """A finite number."""
    try:
        found = float(value) if not isinstance(value, (str, bytes)) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):  # not a number
        found = math.nan
    if not math.isfinite(found):
        refuse(name, value, "a finite number")
    return found


def positive(name: str, value: Any, other: str) -> float:
    """A finite number above 0. `other`: what else is allowed, for the error."""
    known = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not known or not 0.0 < float(value) < math.inf:
        refuse(name, value, f"a number above 0, or {other}")
    return float(value)


def seconds(name: str, value: Any, expected: str = "more than 0 seconds") -> float:
    """A number above 0, which may be infinite."""
    if not isinstance(value, (int, float)) or not value > 0:
        refuse(name, value, expected)
    return float(value) if value < math.inf else math.inf


def flag(name: str, value: Any) -> bool:
    """True or False; also NumPy's, and 0 or 1."""
    if type(value) is bool:
        return value
    if getattr(value, "ndim", 1) == 0 and str(getattr(value, "dtype", "")) == "bool":
        return bool(value)
    if type(value) is not int or value not in (0, 1):
        refuse(name, value, "True or False")
    return bool(value)


def one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """One of some words."""
    words = tuple(allowed)
    if type(value) is not str or value not in words:
        refuse(name, value, f"one of {', '.join(words)}")
    return value


def instance(name: str, value: Any, kind: type, expected: str) -> Any:
    """An object of a class."""
    if not isinstance(value, kind):
        refuse(name, value, expected)
    return value
