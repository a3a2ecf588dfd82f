"""Prints on rank 0 only. Called by users as pycomm.print0."""

from __future__ import annotations

from typing import Any

from pycomm import config, group

__all__ = ["print0"]


def print0(*args: Any, **kwargs: Any) -> None:
    """print() on rank 0, at once; nothing elsewhere. Before init() the environment says who is."""
    rank = group.rank() if group.is_initialized() else config.environment().rank
    if rank == 0:
        print(*args, **{"flush": True, **kwargs})
