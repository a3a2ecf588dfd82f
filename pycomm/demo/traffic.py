"""Bytes that one row of the demo sent to the peers of this process.

pycomm counts them itself. For gloo the Linux kernel does: what the sockets of its group wrote.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import termios
from collections.abc import Iterable

# tcpi_bytes_acked in struct tcp_info of linux/tcp.h since Linux 4.1. tcpi_bytes_sent is no measure:
# it counts again what the queue of the device refused.
ACKNOWLEDGED = slice(120, 128)


def bytes_written(sockets: Iterable[int] | None) -> int:
    """Bytes that this process has written so far to these TCP sockets, without headers and without
    what TCP sends again; None: in pycomm's default group."""
    if sockets is None:
        from pycomm import torch_backend

        return int(torch_backend.stats()["bytes_written"])
    return sum(map(_sent, sockets))


def tcp_sockets() -> set[int]:
    """Descriptors of this process's TCP sockets."""
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed since the listing, or no socket
            s = socket.socket(fileno=number)
            if s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM:
                found.add(number)
            s.detach()
    return found


def _sent(descriptor: int) -> int:
    """Bytes written so far: those that the peer acknowledged and those still in the queue."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as s:  # else closed
        acknowledged = queued = -1
        while acknowledged != (now := _acknowledged(s)):
            queue = fcntl.ioctl(s, termios.TIOCOUTQ, bytes(4))
            acknowledged, queued = now, int.from_bytes(queue, sys.byteorder)
        return acknowledged + queued
    return 0


def _acknowledged(s: socket.socket) -> int:
    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKNOWLEDGED.stop)
    return int.from_bytes(info[ACKNOWLEDGED], sys.byteorder)
