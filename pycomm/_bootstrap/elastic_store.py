"""The rendezvous store of an elastic group: any rank may die, the first too.

Each rank serves a store of its own. All ranks use that of the rank that joined first of those that
live, the lowest of several. Its address is known to every rank, and to joining processes from a
file. The servers and their clients authenticate each other with the run's secret.

A server's keys end with its process. The call that finds this raises `StoreMoved`; the next call
uses the next server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pycomm import _core
from pycomm.errors import InvalidArgument, PeerLost, Timeout

LIMIT_S = 30.0  # default time limit of a call
# A server whose host does not answer for so long is skipped.
CONNECT_S = 2.0
ATTEMPT_S = 0.1  # limit of the first attempt to connect; doubled after each
ROW_BYTES = 256  # of a server in exchange_servers()
LOOPBACK = "127.0.0.1"
FILE_BYTES = 1 << 20  # a larger file of addresses is invalid


class StoreMoved(PeerLost):
    """The process that served the store ended, and its keys with it; another rank serves now."""


@dataclass(frozen=True)
class Server:
    """Where a rank serves its store.

    Attributes:
        generation: in which one of the group the rank joined; of the last rank in this order, the
            one that it is in: each group has a higher one than those that it follows.
    """

    generation: int = dataclasses.field(compare=False)
    host: str
    port: int


NO_SERVER = Server(0, "", 0)


@dataclass
class Elastic:
    """What an elastic group passes on to the groups that replace it.

    Attributes:
        file: the file with the ranks' addresses.
        secret: the run's key.
        servers: by rank.
        own: this process's store; it ends with the last group that refers to it.
        options: for joining processes: the options that must be equal on all ranks.
        joined: the ranks that joined when the group formed.
        grown: how often grow() was called.
        answered: servers and numbers of requests to join that have an answer; shared with the
            groups that replace this one.
    """

    file: str
    secret: str
    servers: list[Server]
    own: _core.TcpStore
    options: dict[str, Any]
    joined: tuple[int, ...] = ()
    grown: int = 0
    answered: set[tuple[Server | None, int]] = dataclasses.field(default_factory=set)

    @property
    def generation(self) -> int:
        """0: of the first group; higher than that of each group before."""
        return max(one.generation for one in self.servers)

    def after(self, slots: Sequence[int], joined: Mapping[int, Server | None]) -> Elastic:
        """What the next group passes on.

        Args:
            slots: by rank of the next group: the rank in this one.
            joined: the servers of new processes by rank in this group; None: unknown.
        """
        servers = [
            (joined[slot] or NO_SERVER) if slot in joined else self.servers[slot] for slot in slots
        ]
        new_ranks = tuple(rank for rank, slot in enumerate(slots) if slot in joined)
        for rank in new_ranks or in_order(servers)[-1:]:
            servers[rank] = dataclasses.replace(servers[rank], generation=self.generation + 1)
        return dataclasses.replace(self, servers=servers, joined=new_ranks, grown=0)

    def store(self, rank: int) -> SurvivingStore:
        """The store of the group whose ranks are `servers`, for this rank."""
        return SurvivingStore(self.servers, self.secret, (self.servers[rank], self.own))


def in_order(servers: Sequence[Server]) -> list[int]:
    """The ranks in the order in which they serve the store."""
    return sorted(range(len(servers)), key=lambda rank: servers[rank].generation)


def serve(towards: str, loopback: bool, key: str, generation: int) -> tuple[_core.TcpStore, Server]:
    """Serves this process's store on any free port.

    Args:
        towards: a host of the run.
        loopback: all ranks run on this host.
        key: the run's key.
        generation: as of Server.
    """
    if loopback:
        store = _core.TcpStore.serve(LOOPBACK, 0, key)
        return store, Server(generation, LOOPBACK, store.port)
    family, _, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect(address)
        host = str(probe.getsockname()[0])
    store = _core.TcpStore.serve("", 0, key)
    return store, Server(generation, host, store.port)


def exchange_servers(core: _core.Group, own: Server) -> list[Server]:
    """By rank: the server of each rank of the first group. All ranks call it.

    Raises:
        ValueError: a rank of another version wrote its server differently.
        Error: as all_reduce.
    """
    row = json.dumps(rows_of([own])).encode().ljust(ROW_BYTES)
    rows = np.empty((core.size, ROW_BYTES), np.uint8)
    _core.Call("all_gather").run(core, np.frombuffer(row, np.uint8), rows)
    return [servers_of(json.loads(one.tobytes()))[0] for one in rows]


class SurvivingStore:
    """The store of the first living server, as a _core.Store.

    Raises:
        StoreMoved: from any method: the server ended; the next call uses another one.
        PeerLost: no server lives.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        key: str,
        own: tuple[Server, _core.TcpStore] | None = None,
    ) -> None:
        self._left = [servers[rank] for rank in in_order(servers)]
        self._key, self._own = key, own
        self._store: _core.TcpStore | None = None
        self._lock = threading.Lock()
        self._why = "their processes ended"

    @property
    def server(self) -> Server | None:
        """The server in use, or to be used next; None if no server lives."""
        return self._left[0] if self._left else None

    def set(self, key: str, value: bytes, timeout_s: float = LIMIT_S) -> None:
        """Stores `value` under `key`."""
        self._call(timeout_s, "set", key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value of `key`. Raises Timeout after `timeout_s`."""
        value: bytes = self._call(timeout_s, "get", key)
        return value

    def add(self, key: str, amount: int, timeout_s: float = LIMIT_S) -> int:
        """Adds to the number under `key`, initially 0; returns the sum."""
        return int(self._call(timeout_s, "add", key, amount))

    def remove(self, key: str, timeout_s: float = LIMIT_S) -> bytes | None:
        """Removes the key; returns its value to exactly one caller, None to the others."""
        value: bytes | None = self._call(timeout_s, "remove", key)
        return value

    def claim(self, key: str, value: bytes, timeout_s: float = LIMIT_S) -> bytes:
        """Stores `value` under `key` unless there is a value; returns the stored one."""
        held: bytes = self._call(timeout_s, "claim", key, value)
        return held

    def claim_in_next(self, key: str, value: bytes, timeout_s: float = LIMIT_S) -> bytes:
        """As claim(), in the store that replaces the one in use if that ends; `value` if there is
        none."""
        end = time.monotonic() + timeout_s
        for server in self._left[1:]:
            try:
                if (store := self._connect(server, end)) is not None:
                    return store.claim(key, value, max(0.0, end - time.monotonic()))
            except PeerLost:  # it ended just now
                continue
        return value

    def all_ranks_connected(self) -> None:
        """Does nothing: joining processes connect later."""

    def _call(self, timeout_s: float, method: str, *given: Any) -> Any:
        end = time.monotonic() + timeout_s
        store = self._connected(end)
        try:
            return getattr(store, method)(*given, max(0.0, end - time.monotonic()))
        except PeerLost as error:
            with self._lock:
                if self._store is store:
                    self._store = None
                    del self._left[0]
            raise StoreMoved(str(error)) from error

    def _connected(self, end: float) -> _core.TcpStore:
        with self._lock:
            while self._store is None:
                if not self._left:
                    raise PeerLost(f"no rank of the elastic group can be reached: {self._why}")
                self._store = self._connect(self._left[0], end)
                if self._store is None:
                    del self._left[0]
            return self._store

    def _connect(self, server: Server, end: float) -> _core.TcpStore | None:
        """A client of the server, or this process's own; None if its process ended, or its host
        does not answer."""
        if self._own is not None and server == self._own[0]:
            return self._own[1]
        end = min(time.monotonic() + CONNECT_S, max(end, time.monotonic() + ATTEMPT_S))
        limit_s = ATTEMPT_S
        while True:
            # The core's client cannot distinguish a server that ended from one that has yet to
            # start.
            try:
                left_s = max(ATTEMPT_S, end - time.monotonic())
                socket.create_connection((server.host, server.port), left_s).close()
            except OSError:  # refused, or no route
                return None
            try:
                return _core.TcpStore.connect(server.host, server.port, self._key, limit_s)
            except Timeout as error:  # it ends just now, or another process has its port
                self._why = str(error)
            if time.monotonic() >= end:
                return None
            limit_s *= 2


def write_file(path: str, servers: Sequence[Server]) -> None:
    """Replaces the file of addresses, which only this user can read, unless it is the same.

    Raises:
        InvalidArgument: the file cannot be written.
    """
    with contextlib.suppress(InvalidArgument):  # replaced
        if rows_of(read_file(path)) == rows_of(servers):
            return
    text = json.dumps(rows_of(servers))
    made = f"{path}.{secrets.token_hex(8)}"
    try:
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        os.replace(made, path)
    except OSError as error:
        raise InvalidArgument(
            f"cannot write the file of an elastic group, {path}: {error}"
        ) from None


def read_file(path: str) -> list[Server]:
    """The addresses in the file; none if there is no file.

    Raises:
        InvalidArgument: the file is invalid, or another user owns it.
    """
    try:
        with open(path, "rb") as file:
            owner, text = os.fstat(file.fileno()).st_uid, file.read(FILE_BYTES)
    except FileNotFoundError:  # no group wrote it yet
        return []
    except OSError as error:
        raise InvalidArgument(
            f"cannot read the file of an elastic group, {path}: {error}"
        ) from None
    if owner not in (os.geteuid(), 0):
        raise InvalidArgument(f"{path}: user {owner} owns this file of an elastic group")
    try:
        return servers_of(json.loads(text))
    except (ValueError, RecursionError):  # not JSON, or not a list of servers
        raise InvalidArgument(
            f"{Path(path)} is no file of an elastic group: expected one that pycomm.init wrote"
        ) from None


def successors(elastic: Elastic, rank: int) -> frozenset[int] | None:
    """The ranks of the group that continued in one without this `rank`, by the file, which is not
    of an older group; None: there is no such group, or it is not known."""
    try:
        found = read_file(elastic.file)
    except InvalidArgument:  # not ours any more
        return None
    older = max((one.generation for one in found), default=-1) < elastic.generation
    if elastic.servers[rank] in found or older:
        return None
    return frozenset(r for r, one in enumerate(elastic.servers) if one in found)


def rows_of(servers: Sequence[Server]) -> list[list[Any]]:
    """The servers as a value for JSON."""
    return [[one.generation, one.host, one.port] for one in servers]


def servers_of(rows: Any) -> list[Server]:
    """The servers in a decoded JSON value. Raises ValueError if it is not a list of them."""
    if not isinstance(rows, list):
        raise ValueError(rows)
    found = []
    for row in rows:
        if not (isinstance(row, list) and [type(one) for one in row] == [int, str, int]):
            raise ValueError(row)
        generation, host, port = row
        if not 0 < port < 1 << 16 or not re.fullmatch(r"[0-9a-zA-Z.:%_-]{1,255}", host):
            raise ValueError(row)
        found.append(Server(generation, host, port))
    return found
