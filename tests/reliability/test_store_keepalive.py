"""Both ends of a store connection have a keepalive timer while no data is in flight."""

import os
import time
from pathlib import Path

from pycomm import _core

KEY = "0123456789abcdef0123456789abcdef"
ESTABLISHED, KEEPALIVE = "01", "02"  # columns "st" and "tr" of /proc/net/tcp


def own_sockets() -> set[str]:
    """The inodes of this process's sockets."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # closed since the directory was listed, as its own descriptor is
            continue
        if target.startswith("socket:["):
            found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def timers(port: int) -> list[str]:
    """The timer of each end of this process's connections to itself at a port, as the kernel lists
    them.

    Unauthenticated clients connect to the port from another process, and another process may use
    the same port number for a connection of its own.
    """
    own, end = own_sockets(), f":{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows = [row for row in lines if row[3] == ESTABLISHED and row[9] in own]
    ends = {(row[1], row[2]) for row in rows}
    return [
        row[5].split(":")[0]
        for row in rows
        if (row[2], row[1]) in ends and (row[1].endswith(end) or row[2].endswith(end))
    ]


def test_store_connections_have_keepalive() -> None:
    server = _core.TcpStore.serve("127.0.0.1", 0, KEY)
    client = _core.TcpStore.connect("127.0.0.1", server.port, KEY, 10.0)
    client.set("key", b"value", 10.0)
    assert client.get("key", 10.0) == b"value"
    end = time.monotonic() + 20  # the last acknowledgement may be delayed
    while (found := timers(server.port)) != [KEEPALIVE] * 2 and time.monotonic() < end:
        os.sched_yield()
    assert found == [KEEPALIVE] * 2
    del client, server
