"""The other hosts' launchers: each writes its place and heartbeats to torch's store.

A heartbeat counts as missing after a time without change on the local clock, as hosts' clocks
differ. This says nothing about ranks, which detect failures on their own.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

__all__ = ["SILENT_S", "START_LIMIT_S", "Hosts"]

HEARTBEAT_S = 5.0  # between heartbeats
SILENT_S = 30.0  # without a heartbeat; a launcher never blocks for so long
START_LIMIT_S = 30.0  # for another host's launcher to write a value, which it does at its start
KEY = "pycomm/launcher/{}"
PLACE_KEY = "pycomm/launcher/{}/place"
ENDED = b"ended"


class Hosts:
    """The launchers of a run: this is number `own` of `count`; `store` is torch's."""

    def __init__(self, store: Any, own: int, count: int) -> None:
        self.count = count
        self._store, self._own = store, own
        self._beats, self._next = 0, 0.0
        self._last_seen: dict[int, tuple[bytes, float]] = {}

    def places(self, ranks: str, where: str) -> list[tuple[str, str]]:
        """The ranks and the place of every host, this one's among them.

        Raises:
            RuntimeError: a host's launcher did not write its own.
        """
        self._store.set(PLACE_KEY.format(self._own), f"{ranks}\n{where}")
        keys = [PLACE_KEY.format(host) for host in range(self.count)]
        self._store.wait(keys, timedelta(seconds=START_LIMIT_S))
        found = [self._store.get(key).decode().split("\n") for key in keys]
        return [(name, place) for name, place in found]

    def send_heartbeat(self) -> None:
        """Writes a heartbeat if one is due; call it often. Raises RuntimeError if the store
        ended."""
        now = time.monotonic()
        if self.count > 1 and now >= self._next:
            self._beats, self._next = self._beats + 1, now + HEARTBEAT_S
            self._store.set(KEY.format(self._own), str(self._beats))

    def report_end(self) -> None:
        """Tells the others that this host's ranks have ended: no more heartbeats follow."""
        self._store.set(KEY.format(self._own), ENDED)

    def find_silent(self) -> int | None:
        """A host whose heartbeat is missing; None if all are alive or ended, or never send
        heartbeats, as torchrun.
        """
        for host in range(self.count):
            key = KEY.format(host)
            if host == self._own or not self._store.check([key]):
                continue
            word, now = self._store.get(key), time.monotonic()
            last, since = self._last_seen.get(host, (b"", now))
            if word != last:
                self._last_seen[host] = word, now
            elif word != ENDED and now - since > SILENT_S:
                return host
        return None
