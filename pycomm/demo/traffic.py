"""Bytes that one row of the demo sent to the peers of this process.

pycomm counts them itself. For gloo the Linux kernel does: TCP_INFO of the sockets of its group.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable

# tcpi_bytes_sent and tcpi_bytes_retrans, which it includes, in struct tcp_info of linux/tcp.h since
# Linux 4.19.
_SENT, _AT = struct.Struct("=QQ"), 200


class Counter:
    """Bytes that a row sent so far, in a process that trains several rows in turn.

    Args:
        sockets: the row's own TCP sockets, which the kernel counts, without TCP headers and
            without what it sent again; None: pycomm's default group, which the rows share.
    """

    def __init__(self, sockets: Iterable[int] | None) -> None:
        self._sockets = None if sockets is None else sorted(sockets)
        self._total, self._last = 0, self._read()

    @property
    def name(self) -> str:
        """What counts: "pycomm", "kernel", or "computed" if nothing does."""
        if self._sockets is None:
            return "pycomm"
        return "kernel" if sys.platform == "linux" else "computed"

    def resume(self) -> None:
        """Begins a turn: ignores what other rows sent in the shared group since the last one."""
        if self._sockets is None:
            self._last = self._read()

    def total(self) -> int:
        """Bytes sent in all turns; 0 if nothing counts them."""
        now = self._read()
        self._total, self._last = self._total + now - self._last, now
        return self._total

    def _read(self) -> int:
        if self._sockets is None:
            from pycomm import torch_backend

            return int(torch_backend.stats()["bytes_written"])
        return sum(_sent(descriptor) for descriptor in self._sockets)


def tcp_sockets() -> set[int]:
    """Descriptors of this process's TCP sockets; empty on systems other than Linux."""
    if sys.platform != "linux":
        return set()
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
    try:
        with socket.socket(fileno=os.dup(descriptor)) as s:
            info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _AT + _SENT.size)
    except OSError:  # closed
        return 0
    if len(info) < _AT + _SENT.size:
        return 0
    sent, again = _SENT.unpack_from(info, _AT)
    return int(sent - again)
