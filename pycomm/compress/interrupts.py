"""Ctrl-C that waits for the end of what must be whole. Called by transaction.py."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["defer_sigint"]


@contextlib.contextmanager
def defer_sigint() -> Iterator[None]:
    """Ctrl-C comes behind the block and not in its midst. For a few assignments that belong
    together: nothing here may wait. Python gives Ctrl-C to the main thread alone, so that in others
    there is nothing to hold back."""
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before is None:  # None: a handler of C, which is not ours to put back
        yield
        return
    came = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
