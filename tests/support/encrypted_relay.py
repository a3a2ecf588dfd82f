"""A relay between two ranks that sees, and may change, their data.

The relay's address replaces that of rank 0 in the store, so that rank 1 connects to the relay,
which connects to rank 0. The relay knows the sizes of the handshake and of the records after it
(docs/internals/wire.md), and does not have the shared secret.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from core_groups import connect

from pycomm import _core
from pycomm.group import Group

HANDSHAKE = {"connector": 36 + 32 + 32, "listener": 68 + 1}  # bytes that each end sends first
KEY = secrets.token_hex(32)
TCP_FIELD = 10  # the line of a rank info with the addresses

Records = list[bytes]
Change = Callable[[Records], Records]


class Relay:
    """Forwards connections; data from rank 1 passes through `change`, record by record."""

    def __init__(self, change: Change, bare: bool = False) -> None:
        self.seen = bytearray()  # data of both ends after the handshake
        self.records = 0  # records of rank 1 so far
        self._change, self._bare = change, bare
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._target: tuple[str, int] | None = None

    def forge_address(self, note: bytes) -> bytes:
        """The rank info of rank 0 with the relay's address."""
        fields = note.decode().split("\n")
        address = next(a for a in fields[TCP_FIELD].split() if a.startswith("127."))
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        fields[TCP_FIELD] = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return "\n".join(fields).encode()

    def hide_address(self, note: bytes) -> bytes:
        """A rank info of rank 1 without a reachable address: rank 0 would connect to itself by the
        relay."""
        fields = note.decode().split("\n")
        fields[TCP_FIELD] = f"127.0.0.1:{self._listener.getsockname()[1]}"
        return "\n".join(fields).encode()

    def close(self) -> None:
        """Closes all connections."""
        for one in self._sockets:
            with contextlib.suppress(OSError):  # closed by its peer
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                caller, _ = self._listener.accept()
                assert self._target is not None
                called = socket.create_connection(self._target)
                self._sockets += [caller, called]
                for pair in ((caller, called, "connector"), (called, caller, "listener")):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, role: str) -> None:
        with contextlib.suppress(OSError, EOFError):  # a side ended: end the other one, too
            left = HANDSHAKE[role]
            while left:
                data = source.recv(left)
                left -= len(data)
                to.sendall(data)
                if not data:
                    raise EOFError
            while True:
                if self._bare or role == "listener":
                    records = [source.recv(65536)]
                    if not records[0]:
                        raise EOFError
                else:
                    records = self._change([_record(source)])
                for one in records:
                    self.seen += one
                    to.sendall(one)
        for one in (source, to):
            with contextlib.suppress(OSError):  # closed already
                one.shutdown(socket.SHUT_RDWR)


def _record(source: socket.socket) -> bytes:
    head = _exactly(source, 4)
    return head + _exactly(source, int.from_bytes(head, "little") + 16)


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = source.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


class Forger:
    """A store in which the rank info of rank 0 has the relay's address."""

    def __init__(self, relay: Relay) -> None:
        self._store, self._relay = _core.LocalStore(), relay

    def set(self, key: str, value: bytes, timeout_s: float = 30.0) -> None:
        """Stores `value`, or its forgery."""
        if key.endswith("/rank_info/0"):
            value = self._relay.forge_address(value)
        if key.endswith("/rank_info/1"):
            value = self._relay.hide_address(value)
        self._store.set(key, value, timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def two_ranks(
    relay: Relay, body: Callable[[Group], Any], encrypt: bool = True, full_mesh: int = 64
) -> list[Any]:
    """The results or errors of `body(group)` on two ranks of two simulated hosts, with `relay`
    between.

    In a group of more than `full_mesh` ranks they connect when one first sends to the other.
    """
    store = Forger(relay)

    def one(rank: int) -> Any:
        group = None
        try:
            options = {"encrypt": encrypt, "full_mesh": full_mesh, "host": "ab"[rank]}
            core = connect(store, rank, 2, secret=KEY, transport="tcp", **options)
            group = Group(core, None, 20.0)
            result = body(group)
            group.close()
        except Exception as error:  # the test checks it
            if group is not None:
                group.close()
            return error
        return result

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(one, range(2)))
    relay.close()
    return results
