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
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from pycomm import _core
from pycomm._bootstrap import thresholds
from pycomm.config import Config, flight_recorder_files, slurm_step
from pycomm.errors import InvalidArgument, PeerLost, Timeout

LIMIT_S = 30.0  # default time limit of a call
# What a store gets to answer in at the end of a time limit, and the shortest limit.
ANSWER_S, SHORTEST_S = 0.3, 0.1
# Pauses between two looks into torch's store: the first, the longest, and how they grow. torch's
# own wait could not be ended, and would block all other calls of the store.
FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGER = 0.0002, 0.02, 1.25
PORT_PAUSE_S = 0.05  # between two attempts to connect to rank 0's port
IDLE_S = 1.0  # afterwards the helper thread ends
ENDED_S = 1.0  # for a call of torch that was interrupted
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


class _Job:
    """A call that a helper thread makes, and its answer."""

    def __init__(self, call: Callable[[_Job], Any]) -> None:
        self.call = call
        self.answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.abandoned = False  # the caller does not wait any more


_idle: list[queue.SimpleQueue[_Job]] = []  # of the helper threads without a call
_idle_lock = threading.Lock()
os.register_at_fork(after_in_child=_idle.clear)


def within(
    limit_s: float, call: Callable[[_Job], Any], interrupt: Callable[[], None] | None = None
) -> Any:
    """What `call` returns or raises. It has no time limit of its own, so a helper thread makes it.
    Raises queue.Empty after the limit. `interrupt`: ends the call then."""
    job = _Job(call)
    with _idle_lock:
        jobs = _idle.pop() if _idle else None
    if jobs is None:
        jobs = queue.SimpleQueue()
        name = "pycomm-torch-store"
        threading.Thread(target=_help, args=(jobs,), name=name, daemon=True).start()
    jobs.put(job)
    try:
        value, error = job.answer.get(timeout=limit_s)
    except queue.Empty:  # raised again, once the call was interrupted
        if interrupt is not None:  # a thread that leaves torch while Python ends aborts the process
            interrupt()
            with contextlib.suppress(queue.Empty):
                job.answer.get(timeout=ENDED_S)
        raise
    finally:
        job.abandoned = True
    if error is not None:
        raise error
    return value


def _help(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        try:
            job = jobs.get(timeout=IDLE_S)
        except queue.Empty:  # ends, unless a job is on its way
            with _idle_lock:
                if jobs in _idle:
                    _idle.remove(jobs)
                    return
            continue
        answer: tuple[Any, BaseException | None]
        try:
            answer = job.call(job), None
        except BaseException as error:  # the caller raises it
            answer = None, error
        with _idle_lock:
            _idle.append(jobs)
        job.answer.put(answer)
        del job, answer  # and what they refer to


class TorchStore:
    """Adapts a torch.distributed store to the core's interface (_core.Store).

    Every call ends within its time limit; torch's own call can wait without limit for a server.

    Any client that can connect to torch's store can write to it. With a `secret`, which is not in
    the store, each value is stored behind an HMAC-SHA256 of its key and itself. An unsigned value
    counts as absent: a client without the secret can disturb the run but not change its decisions.
    Without a secret every client of the store is trusted.

    `watch`: called with torch's store after each wait without success; what it raises ends the
    forming of the group.
    """

    def __init__(
        self, store: Any, secret: str = "", watch: Callable[[Any], None] | None = None
    ) -> None:
        self._store, self._watch = store, watch
        self._key = hmac.digest(secret.encode(), LABEL, "sha256") if secret else None
        self._unanswered = threading.Lock()  # held during a call of torch's store
        self._pause_s, self._silent = FIRST_PAUSE_S, False  # silent: the last call had no answer

    def set(self, key: str, value: bytes, timeout_s: float = LIMIT_S) -> None:
        """Stores `value` under `key`. Raises Timeout after `timeout_s`, as all methods."""
        self._call(timeout_s, "set", key, self._signed(key, value))

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value of `key`. Raises Timeout after `timeout_s`."""
        return self.get_all([key], timeout_s)[0]

    def get_all(
        self, keys: Sequence[str], timeout_s: float, own: tuple[str, bytes] | None = None
    ) -> list[bytes]:
        """Waits for the values of all keys. Raises Timeout after `timeout_s`. `own`: a key and its
        value, to store before."""
        end = time.monotonic() + timeout_s

        def ask(job: _Job) -> tuple[list[bytes], list[bytes | None]]:
            if own is not None:
                self._store.set(own[0], self._signed(*own))
            return self._wait(keys, end, job)

        found, values = self._run(timeout_s + ANSWER_S, "get", "".join(keys[:1]), ask)
        present = [value for value in values if value is not None]
        if len(present) == len(keys):
            return present
        at = values.index(None)
        forged = self._key and found[at] != ABSENT and not found[at].startswith(GONE)
        raise Timeout(
            f"no rank set {keys[at]!r} in torch's store within {timeout_s:.1f} s"
            + (FORGED if forged else ""),
            op="init",
            elapsed_s=timeout_s,
        )

    def _wait(
        self, keys: Sequence[str], end: float, job: _Job
    ) -> tuple[list[bytes], list[bytes | None]]:
        """The stored bytes and the values of the keys: once all are set, or at the end."""
        while True:
            found = self._stored(keys)
            values = [self._value(key, one) for key, one in zip(keys, found, strict=True)]
            left_s = end - time.monotonic()
            if None not in values:
                self._pause_s = FIRST_PAUSE_S
            if None in values and left_s <= 0 and self._watch is not None:
                self._watch(self._store)
            if None not in values or left_s <= 0 or job.abandoned:
                return found, values
            time.sleep(min(left_s, self._pause_s))  # polls: see FIRST_PAUSE_S
            self._pause_s = min(LONGER * self._pause_s, LONGEST_PAUSE_S)

    def _stored(self, keys: Sequence[str]) -> list[bytes]:
        """The stored bytes of the keys; ABSENT for all if one is absent."""
        if not self._store.check(list(keys)):
            return [ABSENT] * len(keys)
        if len(keys) > 1 and self._store.has_extended_api():
            return [bytes(one) for one in self._store.multi_get(list(keys))]
        return [bytes(self._store.get(key)) for key in keys]

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
        """Calls a method of torch's store."""
        return self._run(
            timeout_s, method, key, lambda _: getattr(self._store, method)(key, *given)
        )

    def _run(self, timeout_s: float, method: str, key: str, ask: Callable[[_Job], Any]) -> Any:
        def call(job: _Job) -> Any:
            try:
                return ask(job)
            finally:
                self._silent = False
                self._unanswered.release()

        limit_s = max(timeout_s, SHORTEST_S)
        # One call at a time: after an unanswered call no other would be answered.
        if self._unanswered.acquire(timeout=max(limit_s - self._silent * ANSWER_S, 0.0)):
            try:
                return within(limit_s, call)
            except queue.Empty:  # no answer in time: raised below
                self._silent = True
            except RuntimeError as error:  # of torch: translated if the store is lost
                if type(error).__name__ not in LOST:
                    raise
                text = str(error).partition("\n")[0]
                raise PeerLost(f"lost torch's store: {text}") from None
        raise Timeout(
            f"torch's store did not answer {method}({key!r}) within {timeout_s:.1f} s: the "
            "process that serves it is stopped or unreachable",
            elapsed_s=timeout_s,
        )


def connect(store: _core.Store, **given: Any) -> _core.Group:
    """_core.connect() with this machine's thresholds, unless those of a parent apply, and the
    environment's paths for records; warns if ranks of this host cannot use shared memory.
    """
    tuned = [] if given.get("parent") else thresholds.thresholds()
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
        InvalidArgument: rank 0's address is unknown or in use, or there is neither a secret nor
            torch.
        Timeout, PeerLost: rank 0 is unreachable.
    """
    if config.size == 1:
        return _core.LocalStore()
    end = time.monotonic() + timeout_s  # also of the import of torch
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
    left_s = max(SHORTEST_S, end - time.monotonic())
    return _core.TcpStore.connect(host, port, config.secret, left_s)


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

        return _prefixed(c10d._get_default_store(), config)
    wanted = not config.secret or (config.agent_store and not config.store_port)
    has_address = config.master_host and config.master_port
    if not wanted or not has_address or importlib.util.find_spec("torch") is None:
        return None
    begin = time.monotonic()
    dist = importlib.import_module("torch.distributed")
    return _prefixed(_made(dist, config, begin, timeout_s), config)


def _made(dist: Any, config: Config, begin: float, timeout_s: float) -> Any:
    """torch's store, within the limit. torch's own limits are longer, and it has none while another
    program accepts the connection and says nothing.

    Raises:
        InvalidArgument: this is rank 0, and its port is in use.
        Timeout: rank 0 does not answer.
    """

    def left() -> float:
        return max(SHORTEST_S, begin + timeout_s - time.monotonic())

    def make(_: _Job) -> Any:
        limit = timedelta(seconds=left())
        if config.launcher in ("torchrun", "pycomm"):  # they set the variables that torch reads
            return next(dist.rendezvous("env://", config.rank, config.size, timeout=limit))[0]
        return dist.TCPStore(
            config.master_host,
            config.master_port,
            config.size,
            config.rank == 0,
            limit,
            wait_for_workers=False,
            multi_tenant=True,
        )

    def disconnect() -> None:
        for number in _open_sockets(config.master_port) - before:
            with socket.socket(fileno=os.dup(number)) as one, contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    before: set[int] = set()
    where, why = f"{config.master_host}:{config.master_port}", "it does not answer"
    try:
        if config.rank != 0:  # torch's constructor retries beyond the limit, and prints stacks
            _wait_for_port(config.master_host, config.master_port, begin + timeout_s)
        before = _open_sockets(config.master_port)
        return within(left(), make, disconnect)
    except queue.Empty:  # reported below
        pass
    except (OSError, dist.DistError) as error:  # torch's errors of stores and networks
        why = str(error).partition("\n")[0]
        if config.rank == 0 and "EADDRINUSE" in str(error):
            raise InvalidArgument(
                f"init: rank 0 cannot serve the rendezvous store at {where}: the port is in use; "
                "set MASTER_PORT to a free one on all ranks",
                op="init",
            ) from None
    passed_s = time.monotonic() - begin
    raise Timeout(
        f"init: rank 0 did not serve torch's store at {where} within {passed_s:.1f} s ({why}): it "
        "has not started, or another program uses the port",
        op="init",
        peer=0,
        elapsed_s=passed_s,
    )


def _open_sockets(port: int) -> set[int]:
    """This process's descriptors of connections to the port."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.getpeername()[1:2] == (port,):
                        found.add(int(name))
    return found


def _wait_for_port(host: str, port: int, end: float) -> None:
    """Returns once the port accepts connections. Raises OSError at the end."""
    while True:
        left_s = end - time.monotonic()
        try:
            socket.create_connection((host, port), max(SHORTEST_S, left_s)).close()
            return
        except OSError:  # rank 0 has not started
            if left_s <= 0:
                raise
        time.sleep(min(left_s, PORT_PAUSE_S))  # polls: a port sends no notifications


def host_of(store: Any) -> str:
    """The address of the host that serves a store of torch's, as this process uses it; "" if
    none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _prefixed(store: Any, config: Config) -> TorchStore:
    from torch.distributed.distributed_c10d import PrefixStore

    prefix = f"pycomm/{slurm_step()}" if config.launcher == "slurm" else "pycomm"
    return TorchStore(PrefixStore(prefix, store), config.secret)
