"""A port for processes that a test starts and that have to be told where they meet."""

import socket


def free_port() -> int:
    """One of 127.0.0.1 at which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
