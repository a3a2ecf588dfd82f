"""Groups of the compiled core, formed without pycomm.init(), and ranks that leave."""

from __future__ import annotations

import threading
from typing import Any

import pycomm
from pycomm import _core
from pycomm.group import _living


def connect(store: Any, rank: int, size: int, **options: Any) -> _core.Group:
    """_core.connect() with the least options, but for `options`."""
    given: dict[str, Any] = {
        **{"name": "world", "timeout_s": 20.0, "secret": "", "transport": "", "address": ""},
        **{"route_hint": "", "reproducible": False, "log": False},
    }
    return _core.connect(store, rank=rank, size=size, **(given | options))


def leave(group: pycomm.Group, gone: threading.Event) -> None:
    """A rank that is a thread closes its groups, as if its process ended, and sets `gone`."""
    gone.set()
    for one in (*_living(group._subgroups), group):
        one.close()
