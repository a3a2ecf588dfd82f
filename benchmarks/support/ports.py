"""Free ports for processes that need a rendezvous address."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of 127.0.0.1 without a listener at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
