"""Checks handlers of exceptions: none that catches everything makes an error of pycomm of it.

Arguments are checked before a call (pycomm/_arguments.py), so an unexpected exception is a bug, and
its type and traceback say where.
"""

import ast
from collections.abc import Iterator

import pytest
from paths import ROOT
from source_files import PYTHON

from pycomm import errors

CATCH_ALL = {"Exception", "BaseException", "Error"}  # the last is pycomm's, with InternalError
MADE = {*errors.__all__, "refuse"} - {"InternalError"}
# Modules with such a handler, and why.
ALLOWED = {
    "pycomm/_process_pool.py": "an error of a rank that cannot be pickled: sent as its text",
}


def caught(handler: ast.ExceptHandler) -> set[str]:
    """The names of the classes that a handler catches."""
    if handler.type is None:
        return {"Exception"}
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind).rpartition(".")[2] for kind in kinds}


def turning(source: str) -> Iterator[int]:
    """The lines of handlers that catch everything and make an error of pycomm."""
    for handler in ast.walk(ast.parse(source)):
        if not isinstance(handler, ast.ExceptHandler) or not caught(handler) & CATCH_ALL:
            continue
        calls = (node for part in handler.body for node in ast.walk(part))
        names = (ast.unparse(node.func) for node in calls if isinstance(node, ast.Call))
        if any(name.rpartition(".")[2] in MADE for name in names):
            yield handler.lineno


def test_no_handler_turns_any_exception_into_an_error() -> None:
    found = {str(path.relative_to(ROOT)): list(turning(path.read_text())) for path in PYTHON}
    assert len(found) > 100
    assert {name: lines for name, lines in found.items() if lines}.keys() == ALLOWED.keys()


@pytest.mark.parametrize(
    ("handler", "found"),
    [
        ("except Exception as e:\n raise InvalidArgument(str(e))", True),
        ("except:\n raise errors.Error('x') from None", True),
        ("except (KeyError, BaseException):\n if x:\n  refuse('x', x, 'y')", True),
        ("except errors.Error as e:\n return Unsupported(str(e))", True),
        ("except Exception as e:\n raise InternalError(str(e))", False),
        ("except (TypeError, ValueError):\n raise InvalidArgument('x')", False),
        ("except Exception:\n x()\n raise", False),
    ],
)
def test_such_handlers_are_found(handler: str, found: bool) -> None:
    assert bool([*turning(f"try:\n f()\n{handler}")]) is found
