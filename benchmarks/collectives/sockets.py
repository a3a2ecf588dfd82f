"""The limit of the kernel's TCP: the bytes of a collective around a ring of plain sockets, without
a reduction. A contestant of links.py that bounds the others.
"""

from __future__ import annotations

import select
import socket

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs hide it

from pycomm.bench.collectives.verbs import Call

NAME = "sockets"
BBR = b"bbr"
PIECE = 1 << 18
"""Bytes of a system call; more were no faster, fewer were slower."""


class Ring:
    """A connection to the next rank and one from the rank before; with two ranks it is the same.

    Args:
        address: this rank's, by which others reach it.
        far: whether BBR remains if it is the system's default, because the hosts are distant.
    """

    def __init__(self, store: Store, rank: int, size: int, address: str, far: bool) -> None:
        with socket.create_server((address, 0)) as listener:
            store.set(f"{NAME}/{rank}", f"{address} {listener.getsockname()[1]}")
            calls = size > 2 or rank == 0
            if calls:
                host, port = store.get(f"{NAME}/{(rank + 1) % size}").decode().split()
                self._to = socket.create_connection((host, int(port)))
            self._from = listener.accept()[0] if size > 2 or rank == 1 else self._to
            if not calls:
                self._to = self._from
        for connection in (self._to, self._from):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not far and BBR in connection.getsockopt(
                socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16
            ):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
            connection.setblocking(False)

    def call(self, source: memoryview, target: memoryview) -> Call:
        """Sends the bytes of `source` while as many arrive in `target`."""
        return lambda: self._exchange(source, target)

    def _exchange(self, source: memoryview, target: memoryview) -> None:
        sent = received = 0
        while sent < len(source) or received < len(target):
            moved = 0
            if sent < len(source):
                moved += (n := _send(self._to, source[sent : sent + PIECE]))
                sent += n
            if received < len(target):
                moved += (n := _receive(self._from, target[received : received + PIECE]))
                received += n
            if not moved:
                self._wait(sent < len(source), len(target) - received)

    def _wait(self, sends: bool, missing: int) -> None:
        """Waits until bytes can be sent or have arrived."""
        waiting = select.poll()
        if missing:
            self._from.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(PIECE, missing))
            waiting.register(self._from, select.POLLIN)
        if sends:
            both = missing and self._to is self._from
            waiting.register(self._to, select.POLLOUT | (select.POLLIN if both else 0))
        waiting.poll()


def _send(to: socket.socket, piece: memoryview) -> int:
    try:
        return to.send(piece)
    except BlockingIOError:  # the socket is full
        return 0


def _receive(source: socket.socket, piece: memoryview) -> int:
    try:
        return source.recv_into(piece)
    except BlockingIOError:  # nothing has arrived yet
        return 0
