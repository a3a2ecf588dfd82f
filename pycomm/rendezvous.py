"""Chooses the store in which the ranks of a run find each other. Called by pycomm.init alone.

Two ways. With the run's key rank 0 serves a store of ours, which only a holder of the key can talk
to. Without one, under torchrun, and where a process group of torch's is established already, the
addresses (and the key, if rank 0 has to make it) are exchanged through torch's store.
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import secrets
import sys
import time
from datetime import timedelta
from typing import Any

from pycomm import _core
from pycomm.config import Config
from pycomm.errors import InvalidArgument, Timeout

__all__ = ["find_store", "host_of"]

PAUSE_S = 0.02  # between two looks at torch's store: its own wait would hold Ctrl-C up
# What no value of ours begins with: an answer for a key that is not there, and what remove() leaves
# of a value, with a word of its own.
ABSENT, GONE = b"\0absent", b"\0gone "


class TorchStore:
    """A torch.distributed store as the core wants one: see _core.pyi, PythonStore."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        """Leaves `value` under `key`."""
        self._store.set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of `key`, once somebody has set it. Raises Timeout after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while (value := self._look(key)) is None:
            left = end - time.monotonic()
            if left <= 0:
                raise Timeout(
                    f"nobody set {key!r} in torch's store in {timeout_s:.1f} s",
                    op="init",
                    elapsed_s=timeout_s,
                )
            time.sleep(min(left, PAUSE_S))  # the store has no wait that Ctrl-C ends
        return value

    def add(self, key: str, amount: int) -> int:
        """Adds to the number under `key`, 0 if there is none; gives the sum."""
        return int(self._store.add(key, amount))

    def remove(self, key: str) -> bytes | None:
        """Takes the key away and gives its value to one of those who ask; None to the others."""
        value = self._look(key)
        if value is None:
            return None
        # Not delete_key: it tells several callers that they deleted a key, or deletes a newer one.
        mark = GONE + secrets.token_bytes(8)
        return value if bytes(self._store.compare_set(key, value, mark)) == mark else None

    def claim(self, key: str, value: bytes) -> bytes:
        """Leaves `value` under `key` unless something is there; gives what is."""
        return bytes(self._store.compare_set(key, b"", value))

    def settle(self) -> None:
        """Nothing of ours listens."""

    def _look(self, key: str) -> bytes | None:
        """The value of `key`, or None, at once."""
        value = bytes(self._store.compare_set(key, ABSENT, ABSENT))
        return None if value == ABSENT or value.startswith(GONE) else value


def find_store(config: Config, timeout_s: float) -> _core.Store | _core.PythonStore:
    """The store for this process of a run of `config.size` processes.

    Raises:
        InvalidArgument: nothing says where rank 0 is, or there is no key and no torch.
        Timeout, PeerLost: rank 0 is not there.
    """
    if config.size == 1:
        return _core.LocalStore()
    torch_store = _store_of_torch(config, timeout_s)
    if torch_store is not None:
        return torch_store
    if not config.master_host or not config.master_port:
        raise InvalidArgument(
            f"{config.size} processes need to meet: set MASTER_ADDR and MASTER_PORT to rank 0's "
            "host and a free port there"
        )
    if not config.secret:
        raise InvalidArgument(
            "PYCOMM_SECRET is not set, and without torch's rendezvous the processes need a key: "
            'give all the same, made by python -c "import secrets; print(secrets.token_hex(32))"'
        )
    host, port = config.master_host, config.store_port or config.master_port
    if config.rank == 0:
        return _core.TcpStore.serve(host if _is_loopback(host) else "", port, config.secret)
    return _core.TcpStore.connect(host, port, config.secret, timeout_s)


def _is_loopback(host: str) -> bool:
    """Whether all ranks run on this host, as rank 0 is known by a loopback address. Names are not
    looked up: a host's own name may be its loopback here and its network address elsewhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _store_of_torch(config: Config, timeout_s: float) -> TorchStore | None:
    """torch's store, where it is there already or is the only way to pass a key on. Where our
    launcher reserved a port for pycomm's store, a rank with the key does not import torch."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        from torch.distributed import distributed_c10d as c10d

        return _prefixed(c10d._get_default_store())
    wanted = not config.secret or (config.agent_store and not config.store_port)
    has_address = config.master_host and config.master_port
    if not wanted or not has_address or importlib.util.find_spec("torch") is None:
        return None
    dist = importlib.import_module("torch.distributed")
    if config.launcher in ("torchrun", "pycomm"):  # the variables that torch reads are there
        found = dist.rendezvous(
            "env://", config.rank, config.size, timeout=timedelta(seconds=timeout_s)
        )
        return _prefixed(next(found)[0])
    return _prefixed(
        dist.TCPStore(
            config.master_host,
            config.master_port,
            config.size,
            config.rank == 0,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    )


def host_of(store: Any) -> str:
    """The host that serves a store of torch's, as this process knows it; "" where none does."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _prefixed(store: Any) -> TorchStore:
    from torch.distributed.distributed_c10d import PrefixStore

    return TorchStore(PrefixStore("pycomm", store))
