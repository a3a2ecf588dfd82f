"""The processes that a run lost and does not replace: the others continue, or the run ends.

A supervisor that starts no more processes writes a file, and ends as if its process had succeeded:
torch's agent would end the others otherwise. The launcher counts these files. On several hosts the
launchers add their counts in torch's store; a host without heartbeats lost all its processes.

The ranks read two files beside that of the elastic group: joining.py describes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from pycomm._bootstrap.elastic_store import read_file, rows_of, servers_of, write_file
from pycomm.errors import InvalidArgument
from pycomm.launch.hosts import CHANGES_KEY, ENDED_KEY, LOST_KEY, Hosts, Place

POLL_S = 0.5  # between two looks at the other hosts' losses
SILENT_POLL_S = 5.0  # between two looks for hosts without heartbeats


@dataclass(frozen=True)
class Replacement:
    """How `pycomm launch` replaces ranks.

    Attributes:
        new: how many new processes may take the place of each one.
        min_ranks: the run ends when fewer processes are left; 0: than ranks.
        spares: processes of this host that wait to take a rank; hosts may have different numbers.
    """

    new: int
    min_ranks: int
    spares: int = field(default=0, repr=False, compare=False)

    def row(self) -> str:
        """For the table."""
        least = f", at least {self.min_ranks} ranks" if self.min_ranks else ""
        return f"spares: {self.spares}; new processes: {self.new} in place of each{least}"


class TooFewRanks(Exception):
    """Too few processes are left.

    Attributes:
        failures: of processes of this host, by number.
    """

    def __init__(self, text: str, failures: dict[int, ProcessFailure]) -> None:
        super().__init__(text)
        self.failures = failures


@dataclass
class Losses:
    """Counts the processes that are left.

    Args:
        replacement: the options, equal on all hosts.
        hosts: the launchers; `places` of all of them.
        file: that of the elastic group.

    Raises:
        InvalidArgument: the hosts have different options, or fewer ranks than min_ranks.
    """

    replacement: Replacement
    hosts: Hosts
    places: list[Place]
    file: str
    _known: dict[int, int] = field(default_factory=dict)  # processes lost, by host
    _changes: int = 0
    _next_poll: float = 0.0
    _next_silent: float = 0.0
    _servers: str = ""  # that this host passed on, or received
    _told_end: bool = False
    _written: int = -1

    def __post_init__(self) -> None:
        for place in self.places:
            if place.options != str(self.replacement):
                raise InvalidArgument(
                    "--replace and --min-ranks must be equal on all hosts, and --spares must be on "
                    f"all or none: got {self.replacement} here and {place.options or 'neither'} on "
                    f"{place.where}"
                )
        self.size = sum(place.ranks for place in self.places)
        if self.replacement.min_ranks > self.size:
            raise InvalidArgument(
                f"--min-ranks {self.replacement.min_ranks}: expected at most {self.size}, the "
                "number of ranks"
            )
        self._write()

    def check(self) -> None:
        """Updates the counts; call it often. Raises TooFewRanks."""
        lost = self._files()
        if self.hosts.count > 1:
            self._exchange(len(lost))
        self._known[self.hosts.own] = len(lost)
        least = self.replacement.min_ranks or self.size
        if self._left() < least:
            needed = f"--min-ranks {least}" if self.replacement.min_ranks else f"{least} ranks"
            raise TooFewRanks(
                f"too few processes are left for {needed}: {self._left()}; the run ends",
                {
                    number: ProcessFailure(**json.loads(file.read_text()))
                    for number, file in lost.items()
                },
            )
        self._write()  # after the check, or the ranks that are left could end before the run

    def _processes(self, host: int) -> int:
        return self.places[host].ranks + self.places[host].spares

    def _left(self) -> int:
        total = sum(self._processes(host) for host in range(len(self.places)))
        return total - sum(self._known.values())

    def _write(self) -> None:
        """For the ranks of this host."""
        if self._written != self._left():
            self._written = self._left()
            made = f"{self.file}.processes.new"
            Path(made).write_text(str(self._written))
            os.replace(made, f"{self.file}.processes")

    def _files(self) -> dict[int, Path]:
        """By number of a lost process, in order of time: the file of its supervisor."""
        start = f"{os.path.basename(self.file)}.lost."
        found = sorted(
            Path(self.file).parent.glob(f"{start}*"), key=lambda one: one.stat().st_mtime
        )
        return {int(path.name.removeprefix(start)): path for path in found}

    def _exchange(self, lost: int) -> None:
        """Tells the other hosts, and reads their losses."""
        hosts, ended = self.hosts, os.path.exists(f"{self.file}.ended")
        now = time.monotonic()
        if now < self._next_poll and lost == self._known.get(hosts.own, 0):
            return
        self._next_poll = now + POLL_S
        try:
            self._exchange_servers()
            hosts.report(lost - self._known.get(hosts.own, 0), ended and not self._told_end)
            self._known[hosts.own], self._told_end = lost, ended
            changes = hosts.total(CHANGES_KEY)
            if changes != self._changes:
                self._changes = changes
                for host in set(range(hosts.count)) - {hosts.own}:
                    self._lose(host, hosts.total(LOST_KEY.format(host)))
                if hosts.total(ENDED_KEY):
                    Path(f"{self.file}.ended").touch()
            if now >= self._next_silent:
                self._next_silent = now + SILENT_POLL_S
                for host in hosts.find_silent():
                    self._lose_all(host, "no heartbeat from the launcher of")
        except RuntimeError:  # of torch's store: its host is lost
            for host, place in enumerate(self.places):
                if place.serves and host != hosts.own:
                    self._lose_all(host, "the rendezvous ended with")

    def _exchange_servers(self) -> None:
        """Spares of a host without ranks find the elastic group by the addresses of the others."""
        if all(place.ranks for place in self.places):
            return
        has_ranks = self.places[self.hosts.own].ranks > 0
        text = json.dumps(rows_of(read_file(self.file))) if has_ranks else self.hosts.servers()
        if text in ("", "[]", self._servers):
            return
        self._servers = text
        if has_ranks:
            self.hosts.set_servers(text)
        else:
            with contextlib.suppress(ValueError):  # a program outside the run wrote it
                write_file(self.file, servers_of(json.loads(text)))

    def _lose(self, host: int, count: int) -> None:
        self._known[host] = max(count, self._known.get(host, 0))

    def _lose_all(self, host: int, why: str) -> None:
        if self._known.get(host, 0) < self._processes(host):
            self._lose(host, self._processes(host))
            print(
                f"pycomm launch: {why} host {host} of {self.hosts.count} (from 0); its "
                f"{self._processes(host)} processes count as lost",
                flush=True,
            )
