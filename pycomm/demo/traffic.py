"""Bytes that this process sent to its peers.

pycomm counts them itself. For gloo the Linux kernel does: TCP_INFO of each socket of the process.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys

# Offset of tcpi_bytes_sent, uint64, in struct tcp_info of linux/tcp.h since Linux 4.19.
_BYTES_SENT = 200


def bytes_sent(backend: str) -> tuple[int, str] | None:
    """Bytes sent by the default process group, and the counter: "pycomm" or "kernel".

    None if there is no counter. The kernel's count excludes TCP headers. It includes all sockets of
    the process; in training only those of the process group send more than a few bytes.
    """
    if backend == "pycomm":
        from pycomm import torch_backend

        return int(torch_backend.stats()["bytes_written"]), "pycomm"
    if sys.platform != "linux":
        return None
    return sum(_of_socket(int(name)) for name in os.listdir("/proc/self/fd")), "kernel"


def _of_socket(descriptor: int) -> int:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as s:
            if s.family not in (socket.AF_INET, socket.AF_INET6) or s.type != socket.SOCK_STREAM:
                return 0
            info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 8)
    except OSError:  # closed since the listing
        return 0
    return int(struct.unpack_from("=Q", info, _BYTES_SENT)[0]) if len(info) > _BYTES_SENT else 0
