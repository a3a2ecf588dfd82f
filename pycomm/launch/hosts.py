"""The other hosts' launchers: each writes its place and heartbeats to torch's store.

A heartbeat counts as missing after a time without change on the local clock, as hosts' clocks
differ. This says nothing about ranks, which detect failures on their own.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

HEARTBEAT_S = 5.0  # between heartbeats
SILENT_S = 30.0  # without a heartbeat; a launcher never blocks for so long
START_LIMIT_S = 30.0  # for another host's launcher to write a value, which it does at its start
KEY = "pycomm/launcher/{}"
PLACE_KEY = "pycomm/launcher/{}/place"
# Of total():
LOST_KEY = "pycomm/launcher/{}/lost"  # processes of this host that are not replaced
ENDED_KEY = "pycomm/launcher/ended"  # hosts on which a rank ended with success
LEFT_KEY = "pycomm/launcher/left"  # launchers that no longer use the store
CHANGES_KEY = "pycomm/launcher/changes"  # calls of report()
SERVERS_KEY = "pycomm/launcher/servers"  # of the elastic group, for hosts without ranks
ENDED = b"ended"


@dataclass(frozen=True)
class Place:
    """A host of the run.

    Attributes:
        name, address: of the host; "": unknown.
        ranks: the number of its ranks, which follow those of the hosts before it.
        spares: the number of its spare processes, which follow all ranks likewise.
        serves: its launcher serves torch's store.
        options: how it replaces ranks; "": it does not.
    """

    name: str
    address: str
    ranks: int
    spares: int
    serves: bool
    options: str

    @property
    def where(self) -> str:
        """Its name and address."""
        return ", ".join(filter(None, [self.name, self.address]))


class Hosts:
    """The launchers of a run: this is number `own` of `count`; `store` is torch's."""

    def __init__(self, store: Any, own: int, count: int) -> None:
        self.count, self.own = count, own
        self._store = store
        self._beats, self._next = 0, 0.0
        self._last_seen: dict[int, tuple[bytes, float]] = {}

    def places(self, mine: Place) -> list[Place]:
        """All hosts, of which this is `mine`.

        Raises:
            RuntimeError: a host's launcher did not write its own.
        """
        if self.count == 1:
            return [mine]
        self._store.set(PLACE_KEY.format(self.own), json.dumps(asdict(mine)))
        keys = [PLACE_KEY.format(host) for host in range(self.count)]
        self._store.wait(keys, timedelta(seconds=START_LIMIT_S))
        return [Place(**json.loads(self._store.get(key))) for key in keys]

    def send_heartbeat(self) -> None:
        """Writes a heartbeat if one is due; call it often. Raises RuntimeError if the store
        ended."""
        now = time.monotonic()
        if self.count > 1 and now >= self._next:
            self._beats, self._next = self._beats + 1, now + HEARTBEAT_S
            self._store.set(KEY.format(self.own), str(self._beats))

    def report_end(self) -> None:
        """Tells the others that this host's ranks have ended: no more heartbeats follow."""
        self._store.set(KEY.format(self.own), ENDED)

    def total(self, key: str, more: int = 0) -> int:
        """Adds to a number of all launchers; returns the sum."""
        return int(self._store.add(key, more))

    def report(self, lost: int, ended: bool) -> None:
        """Tells the others how many more processes of this host are lost, and that one ended."""
        if lost:
            self.total(LOST_KEY.format(self.own), lost)
        if ended:
            self.total(ENDED_KEY, 1)
        if lost or ended:
            self.total(CHANGES_KEY, 1)

    def set_servers(self, text: str) -> None:
        """Passes the addresses of the elastic group to hosts without ranks."""
        self._store.set(SERVERS_KEY, text)

    def servers(self) -> str:
        """The last addresses that a host passed; "" if there are none."""
        known = self._store.check([SERVERS_KEY])
        return self._store.get(SERVERS_KEY).decode() if known else ""

    def find_silent(self) -> list[int]:
        """The hosts whose heartbeat is missing; not those that ended, or never send heartbeats, as
        torchrun.
        """
        silent = []
        for host in range(self.count):
            key = KEY.format(host)
            if host == self.own or not self._store.check([key]):
                continue
            word, now = self._store.get(key), time.monotonic()
            last, since = self._last_seen.get(host, (b"", now))
            if word != last:
                self._last_seen[host] = word, now
            elif word != ENDED and now - since > SILENT_S:
                silent.append(host)
        return silent
