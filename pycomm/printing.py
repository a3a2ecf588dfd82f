"""pycomm.print0: print() on rank 0 only."""

from __future__ import annotations

from typing import Any

from pycomm import config, default_group


def print0(*args: Any, **kwargs: Any) -> None:
    """Calls print() on rank 0 and flushes; does nothing on other ranks.

    Before init() the rank is taken from the environment.

    Args:
        args, kwargs: as of print(); flush is True unless given.

    Raises:
        InvalidArgument: before init(): an environment variable is invalid.
    """
    rank = default_group.rank() if default_group.is_initialized() else config.environment().rank
    if rank == 0:
        print(*args, **{"flush": True, **kwargs})
