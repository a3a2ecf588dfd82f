"""Chooses the rendezvous store, in which the ranks of a run find each other, for pycomm.init.

With a shared secret rank 0 serves pycomm's store, which requires it. Without one, under torchrun,
and if torch has a process group already, torch's store holds the addresses (and the secret, if
rank 0 has to create it).
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
from pycomm._bootstrap import thresholds
from pycomm.config import Config, flight_recorder_files
from pycomm.errors import InvalidArgument, PeerLost, Timeout

LIMIT_S = 30.0  # default time limit of a call
# What a store gets to answer in at the end of a time limit, and the shortest limit.
ANSWER_S, SHORTEST_S = 0.3, 0.1
PAUSE_S = 0.02  # between two polls of torch's store, whose own wait would block Ctrl-C
# Prefixes that no value has: of the answer for an absent key, and of the mark that remove() leaves
# (followed by random bytes).
ABSENT, GONE = b"\0absent", b"\0gone "
LABEL = b"pycomm: values in a foreign store"  # for deriving the signature key
LOST = ("DistNetworkError", "DistStoreError")  # torch's errors for a connection that ended
MAC_BYTES, UNIQUE_BYTES = 32, 8
FORGED = (
    ": the stored value lacks the run's signature. Either a rank has no or another PYCOMM_SECRET, "
    "or a program outside the run writes to the store"
)


class TorchStore:
    """Adapts a torch.distributed store to the core's interface (_core.Store).

    Every call ends within its time limit; torch's own call can wait without limit for a server.

    Any client that can connect to torch's store can write to it. With a `secret`, which is not in
    the store, each value is stored behind an HMAC-SHA256 of its key and itself. An unsigned value
    counts as absent: a client without the secret can disturb the run but not change its decisions.
    Without a secret every client of the store is trusted.
    """

    def __init__(self, store: Any, secret: str = "") -> None:
        self._store = store
        self._key = hmac.digest(secret.encode(), LABEL, "sha256") if secret else None
        self._unanswered = threading.Lock()  # held during a call of torch's store

    def set(self, key: str, value: bytes, timeout_s: float = LIMIT_S) -> None:
        """Stores `value` under `key`. Raises Timeout after `timeout_s`, as all methods."""
        self._call(timeout_s, "set", key, self._signed(key, value))

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value of `key`. Raises Timeout after `timeout_s`."""
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
                    f"no rank set {key!r} in torch's store within {timeout_s:.1f} s"
                    + (FORGED if forged else ""),
                    op="init",
                    elapsed_s=timeout_s,
                )
            time.sleep(min(left, PAUSE_S))  # polls: torch's wait would block Ctrl-C

    def add(self, key: str, amount: int, timeout_s: float = LIMIT_S) -> int:
        """Adds to the number under `key`, initially 0; returns the sum.

        Raises:
            InvalidArgument: the value is not a number.
        """
        if self._key is None:
            try:
                return int(self._call(timeout_s, "add", key, amount))
            # From torch's in-memory stores; others close the connection.
            except (ValueError, IndexError):
                text = f"the value of {key!r} in torch's store is not a number"
                raise InvalidArgument(text) from None
        if amount == 0:
            return int(self._value(key, self._look(key, timeout_s)) or 0)

        def following(value: bytes | None) -> bytes:
            return str(int(value or 0) + amount).encode()

        return int(self._replace(key, following, timeout_s))

    def remove(self, key: str, timeout_s: float = LIMIT_S) -> bytes | None:
        """Removes the key; returns its value to exactly one caller, None to the others."""
        end = time.monotonic() + timeout_s
        found = self._look(key, timeout_s)
        value = self._value(key, found)
        if value is None:
            return None
        # Not delete_key: it reports success to several callers, or deletes a newer value.
        mark = GONE + secrets.token_bytes(8)
        left = end - time.monotonic()
        return value if bytes(self._call(left, "compare_set", key, found, mark)) == mark else None

    def claim(self, key: str, value: bytes, timeout_s: float = LIMIT_S) -> bytes:
        """Stores `value` under `key` unless there is a value; returns the stored one."""
        return self._replace(key, lambda found: value if found is None else found, timeout_s)

    def all_ranks_connected(self) -> None:
        """Does nothing: this process serves no store."""

    def _replace(
        self, key: str, following: Callable[[bytes | None], bytes], timeout_s: float
    ) -> bytes:
        """Replaces the value of `key` (None: no valid value) by following(value), atomically;
        returns it."""
        end = time.monotonic() + timeout_s
        found = self._look(key, timeout_s)
        while True:
            value = self._value(key, found)
            wanted = following(value)
            if wanted == value:  # claim() of a set key
                return wanted
            raw = self._signed(key, wanted)
            expected = b"" if found == ABSENT else found
            left = end - time.monotonic()
            found = bytes(self._call(left, "compare_set", key, expected, raw))
            if found == raw:
                return wanted
            if left <= 0:  # another client writes continually
                raise Timeout(f"{key!r} in torch's store kept changing for {timeout_s:.1f} s")

    def _look(self, key: str, timeout_s: float) -> bytes:
        """The stored bytes of `key`, or ABSENT, without waiting."""
        return bytes(self._call(timeout_s, "compare_set", key, ABSENT, ABSENT))

    def _signed(self, key: str, value: bytes) -> bytes:
        """The stored form of a value: with a key, behind its HMAC and random bytes, which
        distinguish it from the same value of another rank.
        """
        if self._key is None:
            return value
        unique = secrets.token_bytes(UNIQUE_BYTES) + value
        return self._mac(key, unique) + unique

    def _value(self, key: str, found: bytes) -> bytes | None:
        """The value in stored bytes; None if it is absent or not signed with the run's key."""
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
        """Calls a method of torch's store on a separate thread, as it has no time limit of its
        own."""
        end = time.monotonic() + max(timeout_s, SHORTEST_S)
        answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answer.put((True, getattr(self._store, method)(key, *given)))
            except BaseException as error:  # the caller raises it
                answer.put((False, error))
            self._unanswered.release()

        # One call at a time: after an unanswered call no other would be answered.
        if self._unanswered.acquire(timeout=max(timeout_s, SHORTEST_S)):
            thread = threading.Thread(target=ask, name="pycomm-torch-store", daemon=True)
            thread.start()
            with contextlib.suppress(queue.Empty):  # no answer in time: raised below
                done, value = answer.get(timeout=max(end - time.monotonic(), SHORTEST_S))
                thread.join()
                if done:
                    return value
                if type(value).__name__ in LOST:
                    text = str(value).partition("\n")[0]
                    raise PeerLost(f"lost torch's store: {text}") from None
                raise value
        raise Timeout(
            f"torch's store did not answer {method}({key!r}) within {timeout_s:.1f} s: the "
            "process that serves it is stopped or unreachable",
            elapsed_s=timeout_s,
        )


def connect(store: _core.Store, **given: Any) -> _core.Group:
    """_core.connect() with this machine's thresholds and the environment's paths for records;
    warns if ranks of this host cannot use shared memory.
    """
    tuned = thresholds.thresholds()
    core = _core.connect(store, **given, tuned=tuned, **flight_recorder_files())
    places = zip(core.members, core.hosts, strict=True)
    here = core.hosts[core.rank]
    by_tcp = [member for member, host in places if host == here and member.transport == "tcp"]
    if by_tcp and not given["transport"] and core.local_rank == 0:
        logging.getLogger("pycomm").warning(
            "%d ranks of this host use TCP, which is slower: the system refuses shared memory or "
            "Unix sockets between these processes; set PYCOMM_TRANSPORT=tcp if this is intended",
            len(by_tcp),
        )
    return core


def find_store(config: Config, timeout_s: float) -> _core.Store:
    """The store for this process of a run of `config.size` processes.

    Raises:
        InvalidArgument: rank 0's address is unknown, or there is neither a secret nor torch.
        Timeout, PeerLost: rank 0 is unreachable.
    """
    if config.size == 1:
        return _core.LocalStore()
    torch_store = _store_of_torch(config, timeout_s)
    if torch_store is not None:
        return torch_store
    if not config.master_host or not config.master_port:
        raise InvalidArgument(
            f"the address of rank 0 is unknown to the {config.size} processes: set MASTER_ADDR and "
            "MASTER_PORT to its host and a free port there"
        )
    if not config.secret:
        raise InvalidArgument(
            "PYCOMM_SECRET is not set, but is required without torch's rendezvous: set the same on "
            'all ranks, made by python -c "import secrets; print(secrets.token_hex(32))"'
        )
    host, port = config.master_host, config.store_port or config.master_port
    if config.rank == 0:
        return _core.TcpStore.serve(host if is_loopback(host) else "", port, config.secret)
    return _core.TcpStore.connect(host, port, config.secret, timeout_s)


def is_served_by_rank_0(config: Config, store: Any) -> bool:
    """Whether the store of find_store() ends with rank 0's process, not with a launcher's."""
    return config.size > 1 and not (isinstance(store, TorchStore) and config.agent_store)


def is_loopback(host: str) -> bool:
    """Whether rank 0's address is a loopback address, so that all ranks run on this host.

    Names are not resolved: a host's own name may resolve to its loopback here and to its network
    address elsewhere.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _store_of_torch(config: Config, timeout_s: float) -> TorchStore | None:
    """torch's store, if it exists already or is the only way to share the secret. If pycomm's
    launcher reserved a port for pycomm's store, a rank with the secret does not import torch.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        from torch.distributed import distributed_c10d as c10d

        return _prefixed(c10d._get_default_store(), config.secret)
    wanted = not config.secret or (config.agent_store and not config.store_port)
    has_address = config.master_host and config.master_port
    if not wanted or not has_address or importlib.util.find_spec("torch") is None:
        return None
    dist = importlib.import_module("torch.distributed")
    if config.launcher in ("torchrun", "pycomm"):  # they set the variables that torch reads
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
    """The address of the host that serves a store of torch's, as this process uses it; "" if
    none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _prefixed(store: Any, secret: str) -> TorchStore:
    from torch.distributed.distributed_c10d import PrefixStore

    return TorchStore(PrefixStore("pycomm", store), secret)
