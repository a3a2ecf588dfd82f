"""Unauthenticated clients: they connect to listening ranks, hold no key and send invalid bytes.

Callers choose the targets and the rate: tests/support/attack.py and connection_flood.py. Imports
only the standard library, so that a client starts at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import struct
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

KEPT = 900  # connections that are held open; the oldest is closed first
WAIT_S = 1.0  # for a connection to be accepted
GREETING = 36  # bytes of the first message of a handshake
ANSWER = 68  # bytes of a listener's reply to a greeting: it expects a proof next
DIAG, BY_FAMILY, DUMP, LISTEN = 4, 20, 0x301, 1 << 10  # the kernel's: sock_diag(7)
SOCKET = "socket:["  # in front of the inode, in the link of a descriptor


class Manner(NamedTuple):
    """The behaviour of an unauthenticated client: its bytes, and its next action."""

    payload: bytes = b""
    then: str = "stays"  # or "shuts" its side, "leaves", "breaks" off; "drips": a byte at a time


MANNERS = (
    Manner(b"G" * 300),
    Manner(),
    Manner(then="shuts"),
    Manner(b"G" * GREETING),  # waits for the answer, and sends no more
    Manner(then="leaves"),
    Manner(bytes.fromhex("16030100c5010000c10303") + b"\x5a" * 200),  # a browser's first, by TLS
    Manner(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\r\n"),
    Manner(b"\xff" * (64 << 10)),  # any length in it is the largest
    Manner(b"G" * GREETING, then="breaks"),
    Manner(b"\x00" * 200, then="drips"),
)

Address = tuple[str, int] | str
"""Of TCP, or the name of an abstract Unix socket, which begins with NUL."""


class Listener(NamedTuple):
    """A listening TCP socket."""

    address: tuple[str, int]
    backlog: int  # length of the queue of connections


class UnauthenticatedClients:
    """Connects to given addresses, in one manner after the other, and keeps connections open."""

    def __init__(self) -> None:
        self.connected = self.refused = 0
        self.let_in = 0  # received more than an unauthenticated client may
        self._manners = itertools.cycle(MANNERS)
        self._kept: OrderedDict[int, _Call] = OrderedDict()
        self._ready = select.epoll()

    def call(self, address: Address) -> None:
        """Connects once."""
        manner = next(self._manners)
        connection = socket.socket(_family(address))
        try:
            connection.settimeout(WAIT_S)
            connection.connect(address)
            connection.setblocking(False)
            call = _Call(connection, manner)
            call.send(1 if manner.then == "drips" else len(manner.payload))
        except OSError:  # no listener, or closed already
            connection.close()
            self.refused += 1
            return
        self.connected += 1
        if manner.then == "shuts":
            with contextlib.suppress(OSError):  # closed by the listener
                connection.shutdown(socket.SHUT_WR)
        if manner.then == "breaks":  # the other end is reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if manner.then in ("leaves", "breaks"):
            connection.close()
            return
        self._kept[connection.fileno()] = call
        self._ready.register(connection, select.EPOLLIN)
        if len(self._kept) > KEPT:
            self._drop(next(iter(self._kept)))

    def go_on(self) -> None:
        """Sends one byte more, and reads the replies."""
        for number, call in list(self._kept.items()):
            if call.manner.then == "drips" and not call.send(1):
                self._drop(number)
        for number, _ in self._ready.poll(0):
            if not self._kept[number].receive():
                self._drop(number)

    def close(self) -> None:
        """Closes all connections."""
        for number in list(self._kept):
            self._drop(number)
        self._ready.close()

    def _drop(self, number: int) -> None:
        call = self._kept.pop(number)
        self.let_in += call.received > ANSWER
        self._ready.unregister(number)
        call.connection.close()


def _family(address: Address) -> int:
    if isinstance(address, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


class _Call:
    """One established connection."""

    def __init__(self, connection: socket.socket, manner: Manner) -> None:
        self.connection, self.manner = connection, manner
        self.sent = self.received = 0

    def send(self, most: int) -> bool:
        """Sends at most so many bytes more; returns whether the connection is open."""
        text = self.manner.payload[self.sent : self.sent + most]
        try:
            self.sent += self.connection.send(text) if text else 0
        except BlockingIOError:  # it does not read
            return True
        except OSError:  # closed by the listener
            return False
        return True

    def receive(self) -> bool:
        """Whether the connection is still open."""
        try:
            received = self.connection.recv(4096)
        except OSError:  # closed by the listener
            return False
        self.received += len(received)
        return bool(received)


def listeners() -> dict[int, Listener]:
    """All TCP sockets of this machine that listen, by inode. Asks the kernel for these alone:
    /proc/net/tcp has each connection that has ended in the last minute, thousands of them."""
    found = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, DIAG) as kernel:
        for family in (socket.AF_INET, socket.AF_INET6):
            wanted = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 0, 0, LISTEN)
            head = struct.pack("=IHHII", 16 + len(wanted), BY_FAMILY, DUMP, 0, 0)
            kernel.send(head + wanted)
            for message in _messages(kernel):
                port, host = struct.unpack_from("!H2x16s", message, 4)
                backlog, inode = struct.unpack_from("=I4xI", message, 60)
                text = socket.inet_ntop(family, host[: 4 if family == socket.AF_INET else 16])
                here = text in ("::", "0.0.0.0")
                found[inode] = Listener(("127.0.0.1" if here else text, port), backlog)
    return found


def _messages(kernel: socket.socket) -> Iterable[bytes]:
    """Reads messages until the kernel marks the end."""
    while True:
        data = kernel.recv(1 << 20)
        while data:
            length, kind = struct.unpack_from("=IH", data)
            if kind != BY_FAMILY:  # the end, or an error
                return
            yield data[16:length]
            data = data[length + 3 & ~3 :]


def unix_sockets(prefix: str) -> dict[int, tuple[str, bool]]:
    """The abstract Unix sockets with this prefix, by inode: the name, and whether it listens."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) == 8 and words[7].startswith("@" + prefix):
            found[int(words[6])] = (words[7][1:], int(words[3], 16) & 1 << 16 != 0)
    return found


def inodes(pids: Iterable[int]) -> set[int]:
    """The sockets that these processes have open."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    link = os.readlink(f"/proc/{pid}/fd/{name}")
                    if link.startswith(SOCKET):
                        found.add(int(link[len(SOCKET) : -1]))
    return found


def with_descendants(pid: int) -> set[int]:
    """A process and all its descendants."""
    found = {pid}
    with contextlib.suppress(OSError):  # it has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has
                for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                    found |= with_descendants(int(child))
    return found
