"""Rendezvous of a launch: torch's store on the loopback, a port for pycomm's store, the key.

On several hosts torch's own rendezvous is used (agent.py).
"""

from __future__ import annotations

import functools
import secrets
import socket
from typing import TYPE_CHECKING, Any

from pycomm import config

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs hide it

PORT_KEY = "pycomm/store_port"  # key in torch's store, for the launchers of other hosts
LOOPBACK = "127.0.0.1"
BACKEND = "loopback"  # the name by which torch's launcher finds the rendezvous


def new_key() -> str:
    """A random key for one run."""
    return secrets.token_hex(32)


def missing_secret_warning(where: str) -> str:
    """A launcher's warning about a run on several hosts without a shared secret."""
    return (
        f"PYCOMM_SECRET is not set: any client that can reach {where} can join this run and change "
        "its results; remedy: set the same PYCOMM_SECRET on all hosts"
    )


def local_store(port: int) -> TCPStore:
    """torch's store, served by this process on the loopback only: torch itself listens on every
    interface, whatever host is given.

    Args:
        port: 0 for any free port.

    Raises:
        OSError: the port is in use.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # stubs hide it

    listener = socket.create_server((LOOPBACK, port), backlog=512)
    port = listener.getsockname()[1]
    listener.setblocking(False)
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # torch's from here on
    )


def reserve_port(several_hosts: bool) -> socket.socket:
    """Reserves a port for pycomm's store of rank 0 while the socket is open.

    The system does not assign the port to other processes. The socket does not listen: rank 0 binds
    the same port, which SO_REUSEADDR permits as long as only one of them listens.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("" if several_hosts else LOOPBACK, 0))
    return reserved


def variables(port: int) -> dict[str, str]:
    """The environment variable that passes this port to the ranks."""
    return {config.STORE_PORT: str(port)}


@functools.cache
def register_rendezvous() -> str:
    """Registers the rendezvous of one host with torch's launcher; returns the --rdzv-backend
    name."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # stubs hide it
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
    )

    class OneHost(RendezvousHandler):
        """A single agent that serves the store of its ranks."""

        use_agent_store = True

        def __init__(self, port: int, run_id: str) -> None:
            self._store, self._run_id, self._round = local_store(port), run_id, 0

        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            self._round += 1
            store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            """No other agent can join."""

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return self._run_id

        def shutdown(self) -> bool:
            return True

    def create(parameters: RendezvousParameters) -> Any:
        return OneHost(int(parameters.endpoint.rpartition(":")[2]), parameters.run_id)

    rendezvous_handler_registry.register(BACKEND, create)
    return BACKEND
