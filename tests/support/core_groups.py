"""Groups of the compiled core, formed without pycomm.init()."""

from __future__ import annotations

from typing import Any

from pycomm import _core


def connect(store: Any, rank: int, size: int, **options: Any) -> _core.Group:
    """_core.connect() with the least options, but for `options`."""
    given: dict[str, Any] = {
        **{"name": "world", "timeout_s": 20.0, "secret": "", "transport": "", "address": ""},
        **{"route_hint": "", "reproducible": False, "log": False},
    }
    return _core.connect(store, rank=rank, size=size, **(given | options))
