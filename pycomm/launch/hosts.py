"""Which hosts' launchers are still there: each leaves a new word in torch's store now and then.

What counts is for how long a word has not changed, by the own clock, as hosts' clocks differ. Says
nothing of ranks, which hear of each other by themselves. Called by agent.py.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["SILENT_S", "Hosts"]

WORD_S = 5.0  # between words
SILENT_S = 30.0  # without a new one; a launcher does nothing that takes as long
KEY = "pycomm/launcher/{}"
ENDED = b"ended"


class Hosts:
    """The launchers of a run, of which this is number `own` of `count`; `store` is torch's."""

    def __init__(self, store: Any, own: int, count: int) -> None:
        self.count = count
        self._store, self._own = store, own
        self._words, self._next = 0, 0.0
        self._heard: dict[int, tuple[bytes, float]] = {}

    def here(self) -> None:
        """Tells the others, if it is time to: to be called often. Raises RuntimeError where the
        store has gone.
        """
        now = time.monotonic()
        if self.count > 1 and now >= self._next:
            self._words, self._next = self._words + 1, now + WORD_S
            self._store.set(KEY.format(self._own), str(self._words))

    def ended(self) -> None:
        """Tells the others that this host's ranks have ended: nobody has to listen for it."""
        self._store.set(KEY.format(self._own), ENDED)

    def silent(self) -> int | None:
        """A host whose launcher should have said something since this was first called; None where
        all have, or have ended, or never say anything, as torchrun does not."""
        for host in range(self.count):
            key = KEY.format(host)
            if host == self._own or not self._store.check([key]):
                continue
            word, now = self._store.get(key), time.monotonic()
            last, since = self._heard.get(host, (b"", now))
            if word != last:
                self._heard[host] = word, now
            elif word != ENDED and now - since > SILENT_S:
                return host
        return None
