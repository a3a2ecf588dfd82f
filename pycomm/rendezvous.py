"""Chooses the store in which the ranks of a run find each other. Called by pycomm.init alone.

Two ways. With the run's key rank 0 serves a store of ours, which only a holder of the key can talk
to. Without one, under torchrun, and where a process group of torch's is established already, the
addresses (and the key, if rank 0 has to make it) are exchanged through torch's store.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import importlib.util
import ipaddress
import logging
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pycomm import _core
from pycomm.config import Config
from pycomm.errors import InvalidArgument, Timeout

__all__ = ["connect", "find_store", "host_of"]

LIMIT_S = 30.0  # of a call whose caller gives none
# So long a healthy store may take to answer at the end of a limit, and at the least.
ANSWER_S, SHORTEST_S = 0.3, 0.1
PAUSE_S = 0.02  # between two looks at torch's store: its own wait would hold Ctrl-C up
# What no value of ours begins with: an answer for a key that is not there, and what remove() leaves
# of a value, with a word of its own.
ABSENT, GONE = b"\0absent", b"\0gone "
LABEL = b"pycomm: values in a foreign store"  # what the key of their signatures is derived with
MAC_BYTES, UNIQUE_BYTES = 32, 8
FORGED = (
    ": what is there lacks the run's signature. Either a rank has no PYCOMM_SECRET or another one, "
    "or a program that does not belong to the run writes to the store"
)


class TorchStore:
    """A torch.distributed store as the core wants one: see _core.pyi, PythonStore.

    Every call ends within its limit: torch's own wait for a server that does not answer for ever.

    Anybody who reaches torch's store can write to it. Where the run has a `secret`, which is not in
    the store, each value is kept behind an HMAC-SHA256 of its key and itself, and what has none
    counts as absent: a client without the secret can hinder the run and decides nothing in it.
    Without a secret the store is the boundary: who reaches it is trusted.
    """

    def __init__(self, store: Any, secret: str = "") -> None:
        self._store = store
        self._key = hmac.digest(secret.encode(), LABEL, "sha256") if secret else None
        self._unanswered = threading.Lock()  # held while a call of torch's runs

    def set(self, key: str, value: bytes, timeout_s: float = LIMIT_S) -> None:
        """Leaves `value` under `key`. This and the others raise Timeout after `timeout_s`."""
        self._call(timeout_s, "set", key, self._signed(key, value))

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of `key`, once somebody has set it. Raises Timeout after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while True:
            found = self._look(key, end - time.monotonic() + ANSWER_S)
            value = self._value(key, found)
            if value is not None:
                return value
            left = end - time.monotonic()
            if left <= 0:
                forged = self._key and found != ABSENT and not found.startswith(GONE)
                raise Timeout(
                    f"nobody set {key!r} in torch's store in {timeout_s:.1f} s"
                    + (FORGED if forged else ""),
                    op="init",
                    elapsed_s=timeout_s,
                )
            time.sleep(min(left, PAUSE_S))  # the store has no wait that Ctrl-C ends

    def add(self, key: str, amount: int, timeout_s: float = LIMIT_S) -> int:
        """Adds to the number under `key`, 0 if there is none; gives the sum.

        Raises:
            InvalidArgument: what is there is no number.
        """

        if self._key is None:
            try:
                return int(self._call(timeout_s, "add", key, amount))
            except (ValueError, IndexError):  # by torch's stores in memory; others hang up
                text = f"the value of {key!r} in torch's store is no number that can be added to"
                raise InvalidArgument(text) from None
        if amount == 0:
            return int(self._value(key, self._look(key, timeout_s)) or 0)

        def following(value: bytes | None) -> bytes:
            return str(int(value or 0) + amount).encode()

        return int(self._replace(key, following, timeout_s))

    def remove(self, key: str, timeout_s: float = LIMIT_S) -> bytes | None:
        """Takes the key away and gives its value to one of those who ask; None to the others."""
        end = time.monotonic() + timeout_s
        found = self._look(key, timeout_s)
        value = self._value(key, found)
        if value is None:
            return None
        # Not delete_key: it tells several callers that they deleted a key, or deletes a newer one.
        mark = GONE + secrets.token_bytes(8)
        left = end - time.monotonic()
        return value if bytes(self._call(left, "compare_set", key, found, mark)) == mark else None

    def claim(self, key: str, value: bytes, timeout_s: float = LIMIT_S) -> bytes:
        """Leaves `value` under `key` unless something is there; gives what is."""
        return self._replace(key, lambda found: value if found is None else found, timeout_s)

    def settle(self) -> None:
        """Nothing of ours listens."""

    def _replace(
        self, key: str, following: Callable[[bytes | None], bytes], timeout_s: float
    ) -> bytes:
        """Replaces the value of `key`, None where there is none of the run's, by what follows it,
        in one step; gives that."""
        end = time.monotonic() + timeout_s
        found = self._look(key, timeout_s)
        while True:
            value = self._value(key, found)
            wanted = following(value)
            if wanted == value:  # of a claim
                return wanted
            raw = self._signed(key, wanted)
            expected = b"" if found == ABSENT else found
            left = end - time.monotonic()
            told = bytes(self._call(left, "compare_set", key, expected, raw))
            if told == raw:
                return wanted
            if left <= 0:  # somebody writes again and again
                raise Timeout(f"{key!r} in torch's store did not stay for {timeout_s:.1f} s")
            found = told

    def _look(self, key: str, timeout_s: float) -> bytes:
        """What is there under `key`, or ABSENT, at once."""
        return bytes(self._call(timeout_s, "compare_set", key, ABSENT, ABSENT))

    def _signed(self, key: str, value: bytes) -> bytes:
        """The value as it is stored: where there is a key, behind its HMAC and random bytes, by
        which it is told from the same value of another rank."""
        if self._key is None:
            return value
        unique = secrets.token_bytes(UNIQUE_BYTES) + value
        return self._mac(key, unique) + unique

    def _value(self, key: str, found: bytes) -> bytes | None:
        """What was stored there by a holder of the key; None if nothing was."""
        if found == ABSENT or found.startswith(GONE):
            return None
        if self._key is None:
            return found
        unique = found[MAC_BYTES:]
        if not hmac.compare_digest(found[:MAC_BYTES], self._mac(key, unique)):
            return None
        return unique[UNIQUE_BYTES:]

    def _mac(self, key: str, unique: bytes) -> bytes:
        place = key.encode("utf-8", "surrogatepass")
        text = len(place).to_bytes(4, "little") + place + unique
        return hmac.digest(self._key or b"", text, "sha256")

    def _call(self, timeout_s: float, method: str, key: str, *given: Any) -> Any:
        """A method of torch's store, on a thread of its own: it has no limit there."""
        end = time.monotonic() + max(timeout_s, SHORTEST_S)
        answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answer.put((True, getattr(self._store, method)(key, *given)))
            except BaseException as error:  # the caller raises it
                answer.put((False, error))
            self._unanswered.release()

        # One call at a time: behind one that has no answer no other would get one.
        if self._unanswered.acquire(timeout=max(timeout_s, SHORTEST_S)):
            thread = threading.Thread(target=ask, name="pycomm-torch-store", daemon=True)
            thread.start()
            with contextlib.suppress(queue.Empty):
                done, value = answer.get(timeout=max(end - time.monotonic(), SHORTEST_S))
                thread.join()
                if done:
                    return value
                raise value
        raise Timeout(
            f"torch's store did not answer to {method}({key!r}) within {timeout_s:.1f} s: the "
            "process that serves it is stopped or cannot be reached",
            elapsed_s=timeout_s,
        )


def connect(store: _core.Store | _core.PythonStore, **given: Any) -> _core.Group:
    """_core.connect(), with a warning where ranks of this host get no shared memory."""
    core = _core.connect(store, **given)
    places = zip(core.members, core.hosts, strict=True)
    here = core.hosts[core.rank]
    by_tcp = [member for member, host in places if host == here and member.transport == "tcp"]
    if by_tcp and not given["transport"] and core.local_rank == 0:
        logging.getLogger("pycomm").warning(
            "%d ranks of this host are reached by TCP, which is slower: the system refuses shared "
            "memory or Unix sockets between these processes; PYCOMM_TRANSPORT=tcp says that this "
            "is intended",
            len(by_tcp),
        )
    return core


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

        return _prefixed(c10d._get_default_store(), config.secret)
    wanted = not config.secret or (config.agent_store and not config.store_port)
    has_address = config.master_host and config.master_port
    if not wanted or not has_address or importlib.util.find_spec("torch") is None:
        return None
    dist = importlib.import_module("torch.distributed")
    if config.launcher in ("torchrun", "pycomm"):  # the variables that torch reads are there
        found = dist.rendezvous(
            "env://", config.rank, config.size, timeout=timedelta(seconds=timeout_s)
        )
        return _prefixed(next(found)[0], config.secret)
    return _prefixed(
        dist.TCPStore(
            config.master_host,
            config.master_port,
            config.size,
            config.rank == 0,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        ),
        config.secret,
    )


def host_of(store: Any) -> str:
    """The host that serves a store of torch's, as this process knows it; "" where none does."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _prefixed(store: Any, secret: str) -> TorchStore:
    from torch.distributed.distributed_c10d import PrefixStore

    return TorchStore(PrefixStore("pycomm", store), secret)
