"""Bytes that one row of the demo sent to the peers of this process.

pycomm counts them itself. For gloo the Linux kernel does: what the sockets of its group wrote.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import stat
import struct
import termios
from collections.abc import Iterable

# tcpi_bytes_acked in struct tcp_info of linux/tcp.h since Linux 4.1. tcpi_bytes_sent is no measure:
# it counts again what the queue of the device refused.
_ACKNOWLEDGED, _AT = struct.Struct("=Q"), 120


class Counter:
    """Bytes that a row sent so far, in a process that trains several rows in turn.

    Args:
        sockets: the row's own TCP sockets, which the kernel counts, without TCP headers and
            without what TCP sends again; None: pycomm's default group, which the rows share.
    """

    def __init__(self, sockets: Iterable[int] | None) -> None:
        self._sockets = None if sockets is None else sorted(sockets)
        self._total, self._last = 0, self._read()

    @property
    def name(self) -> str:
        """What counts: "pycomm" or "kernel"."""
        return "pycomm" if self._sockets is None else "kernel"

    def resume(self) -> None:
        """Begins a turn: ignores what other rows sent in the shared group since the last one."""
        if self._sockets is None:
            self._last = self._read()

    def total(self) -> int:
        """Bytes sent in all turns."""
        now = self._read()
        self._total, self._last = self._total + now - self._last, now
        return self._total

    def _read(self) -> int:
        if self._sockets is None:
            from pycomm import torch_backend

            return int(torch_backend.stats()["bytes_written"])
        return sum(_sent(descriptor) for descriptor in self._sockets)


def tcp_sockets() -> set[int]:
    """Descriptors of this process's TCP sockets."""
    return {int(name) for name in os.listdir("/proc/self/fd") if _is_tcp(int(name))}


def _is_tcp(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as s:
            return s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM
    except OSError:  # closed since the listing
        return False


def _sent(descriptor: int) -> int:
    """Bytes written so far: those that the peer acknowledged and those still in the queue."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as s:
            acknowledged = _acknowledged(s)
            while True:
                queued = _queued(s)
                before, acknowledged = acknowledged, _acknowledged(s)
                if before == acknowledged:
                    return acknowledged + queued
    except OSError:  # closed
        return 0


def _acknowledged(s: socket.socket) -> int:
    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _AT + _ACKNOWLEDGED.size)
    if len(info) < _AT + _ACKNOWLEDGED.size:
        return 0
    return int(_ACKNOWLEDGED.unpack_from(info, _AT)[0])


def _queued(s: socket.socket) -> int:
    size = array.array("i", [0])
    fcntl.ioctl(s, termios.TIOCOUTQ, size)
    return size[0]
