"""Tests whose body is the program of each rank.

    @on_ranks(2)
    @pytest.mark.parametrize("dtype", ["float32", "int64"])
    def test_sum(group: Group, dtype: str) -> None:

runs the body on two ranks as threads. Parameters and fixtures of pytest follow the group. If the
body returns tensors, they must be equal on all ranks, except for the sign of zero. The number of
ranks may be a parameter too, by its name; the body needs it only if it uses it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from pycomm.testing import run_ranks

Test = Callable[..., Any]


def with_parameters(test: Test, parameters: list[str]) -> Test:
    """The test, for which pytest fills these parameters."""
    kind = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
    test.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads it
    return test


def on_ranks(size: int | str, **options: Any) -> Callable[[Test], Test]:
    """Runs a test on `size` ranks; `options` are those of run_ranks()."""

    def decorate(program: Test) -> Test:
        own = list(inspect.signature(program).parameters)[1:]

        @functools.wraps(program)
        def test(**given: Any) -> None:
            ranks = size if isinstance(size, int) else given[size]
            body = functools.partial(program, **{name: given[name] for name in own})
            first, *others = run_ranks(ranks, body, **options)
            for other in others:
                assert len(first or ()) == len(other or ())
                for x, y in zip(first or (), other or (), strict=True):
                    assert x.shape == y.shape
                    assert (x == y).all()

        unused = [size] if isinstance(size, str) and size not in own else []
        return with_parameters(test, [*own, *unused])

    return decorate
