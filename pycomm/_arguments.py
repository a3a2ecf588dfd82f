"""Checks of arguments before a call: one form of the errors, *invalid X: got V, expected R*.

also_named() takes arguments under the names of other libraries.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from pycomm.errors import InvalidArgument

P = ParamSpec("P")
R = TypeVar("R")

Check = Callable[[str, Any], object]  # of a value with a name; raises InvalidArgument

PLAIN = (type(None), bool, int, float, str, bytes)


def shown(value: Any) -> str:
    """A value of a plain type as text, else the type: other texts may be long, or raise."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
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


def elements(name: str, value: Any, expected: str) -> list[Any]:
    """The elements of an object that can be iterated and is no text."""
    if isinstance(value, (str, bytes)):
        refuse(name, value, expected)
    try:
        return list(value)
    except (TypeError, ValueError, RuntimeError):  # no sequence; the second and third are torch's
        refuse(name, value, expected)


def integers(name: str, value: Any, least: int | None = None, most: int | None = None) -> list[int]:
    """A sequence of integers as a list, each as of integer()."""
    try:
        found = [operator.index(one) for one in elements(name, value, "a list of integers")]
    except (TypeError, ValueError):  # an element is no integer
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


def real(name: str, value: Any) -> float:
    """A number, which may be infinite or NaN."""
    if not isinstance(value, numbers.Real):
        refuse(name, value, "a number")
    try:
        return float(value)
    except OverflowError:  # an integer beyond the largest number
        refuse(name, value, "a number of float64")


def numbers_in(name: str, value: Any) -> list[float]:
    """A sequence of finite numbers as a list; a number is a sequence of one."""
    if isinstance(value, numbers.Real):
        return [number(name, value)]
    found = elements(name, value, "a number or a list of numbers")
    if not found:
        refuse(name, value, "a number or a list of numbers")
    return [number(f"{name}[{i}]", one) for i, one in enumerate(found)]


def positive(name: str, value: Any, other: str) -> float:
    """A finite number above 0. `other`: what else is allowed, for the error; "": nothing."""
    known = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not known or not 0 < value <= sys.float_info.max:
        refuse(name, value, f"a number above 0{other and f', or {other}'}")
    return float(value)


def seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """A number above 0, which may be infinite; with `zero` also 0."""
    if not isinstance(value, (int, float)) or not (value > 0 or (zero and value == 0)):
        refuse(name, value, "at least 0 seconds" if zero else "more than 0 seconds")
    return float(value) if value <= sys.float_info.max else math.inf


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


def function(name: str, value: Any, expected: str = "a function") -> Any:
    """An object that can be called."""
    if not callable(value):
        refuse(name, value, expected)
    return value


def mapping(name: str, value: Any, keys: Iterable[str] = ()) -> Mapping[str, Any]:
    """A dict, or another mapping, with these keys among others."""
    if not isinstance(value, Mapping):
        refuse(name, value, "a dict")
    for key in keys:
        if key not in value:
            raise InvalidArgument(f"invalid {name}: got no {key!r}, expected a dict that has it")
    return value


def plain_text(name: str, value: Any) -> str:
    """A text that can be encoded as UTF-8."""
    try:
        valid = isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # half a surrogate pair
        valid = False
    if not valid:
        refuse(name, value, "a text")
    return str(value)


def whole(name: str, value: Any) -> int:
    """An integer from 0."""
    return integer(name, value, 0)


def check_fields(
    name: str, value: Any, needed: Mapping[str, Check], more: Mapping[str, Check] | None = None
) -> None:
    """Checks a saved state: a dict with the values `needed`; those of `more` may be missing."""
    mapping(name, value, needed)
    for key, check in {**needed, **(more or {})}.items():
        if key in value:
            check(f"{name}[{key!r}]", value[key])


def check_version(owner: str, saved: Any, version: int) -> None:
    """Raises InvalidArgument unless a saved state is a dict of this version."""
    found = mapping("state", saved).get("version")
    if type(found) is not int or found != version:
        raise InvalidArgument(
            f"{owner}: invalid state version: got {shown(found)}, expected {version}"
        )


def list_of(check: Check) -> Check:
    """The check of a list or tuple of such values."""

    def each(name: str, value: Any) -> None:
        if not isinstance(value, (list, tuple)):
            refuse(name, value, "a list")
        for i, one in enumerate(value):
            check(f"{name}[{i}]", one)

    return each


def dict_of(check: Check) -> Check:
    """The check of a dict of such values."""

    def each(name: str, value: Any) -> None:
        for key, one in mapping(name, value).items():
            check(f"{name}[{shown(key)}]", one)

    return each


def path(name: str, value: Any) -> str:
    """The path of a file, as a text; of a pathlib.Path, too."""
    expected = "a path"
    if not isinstance(value, (str, os.PathLike)):
        refuse(name, value, expected)
    found: Any = os.fspath(value)
    try:
        valid = isinstance(found, str) and found != "" and os.fsencode(found) != b""
    except UnicodeEncodeError:  # half a surrogate pair, which no file name has
        valid = False
    if not valid:
        refuse(name, value, expected)
    return str(found)


def also_named(**others: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for functions whose arguments have other names in other libraries.

    Each of `others` gives the function's own name, and the argument is passed on under it; or, if
    there is no such argument, a sentence that ends the TypeError for its use.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in others.keys() & kwargs.keys():
                where = f"{function.__qualname__.removesuffix('.__init__')}()"
                own = others[name]
                if not own.isidentifier():
                    raise TypeError(f"{where} has no argument {name!r}: {own}")
                if own in kwargs:
                    raise TypeError(f"{where} got {name!r} and {own!r}, which are the same")
                kwargs[own] = kwargs.pop(name)
            return function(*args, **kwargs)

        return call

    return decorate
