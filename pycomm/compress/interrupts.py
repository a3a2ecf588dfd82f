"""Defers Ctrl-C during changes that must not be interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def defer_sigint() -> Iterator[None]:
    """Defers Ctrl-C to the end of the block, which must be short and must not wait. Python delivers
    Ctrl-C to the main thread only, so this does nothing in other threads."""
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before is None:  # None: a C handler, which Python cannot restore
        yield
        return
    received = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)
