"""Runs ranks on one machine for tests, as threads of this process or as processes.

    def sums(group, n):
        return pycomm.all_reduce(np.full(n, group.rank), group=group)

    results = run_ranks(4, sums, 1000)

The group is also the default group of the rank's thread. A FaultPlan injects a fault on one rank,
and `status` shows the state of every peer.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from pycomm import _core, config
from pycomm.errors import Error, InvalidArgument, PeerLost, Timeout
from pycomm.group import Group, as_thread_default

__all__ = ["FaultPlan", "run_ranks", "status"]

EXIT_TIMEOUT_S = 5.0  # for the other ranks to exit after the first failure


def run_ranks(  # noqa: PLR0913 - all but the first two have defaults
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    transport: str = "local",
    processes: bool = False,
    timeout_s: float = 60.0,
    heartbeat_s: float = 10.0,
    reproducible: bool = False,
    encrypt: bool = False,
    faults: Sequence[FaultPlan] = (),
    link_bytes_per_s: float | None = None,
    host_names: Sequence[str] = (),
    exit_timeout_s: float | None = None,
    return_exceptions: bool = False,
) -> list[Any]:
    """Runs `fn(group, *args)` as each of `n` ranks of a new group; returns the results by rank.

    Args:
        n: number of ranks.
        fn: the function of each rank; with `processes` it must be importable and its results
            picklable.
        args: further arguments of `fn`.
        transport: "local" (threads only), "shm", "tcp", or "" for the best.
        processes: each rank is a new process instead of a thread.
        timeout_s: the group's time limit in seconds, for its forming and each call.
        heartbeat_s, reproducible, encrypt: as of `pycomm.init`.
        faults: faults to inject; "kill" and "stop" need `processes`.
        link_bytes_per_s: bandwidth of each rank's simulated link, in bytes per second and
            direction; None: unlimited. A token bucket in front of the transport; frame headers
            count.
        host_names: by rank: the name of its simulated host, up to 12 letters and digits. Ranks of
            different hosts use TCP, which `transport` must allow: "" or "tcp"; with `encrypt` it is
            encrypted. Empty: all ranks are on this host.
        exit_timeout_s: time in seconds for other processes to exit after the first failure; None:
            5.
        return_exceptions: return failures in the list as exceptions; PeerLost for a process that
            died.

    Raises:
        InvalidArgument: the options do not fit together.
        Exception: the first failure of any rank, with a note that names the rank; if that error
            names a peer that failed too, the peer's. The other ranks' groups are aborted.
    """
    options = {
        "size": n,
        "timeout_s": timeout_s,
        "heartbeat_s": heartbeat_s,
        "reproducible": reproducible,
        "encrypt": encrypt,
        "transport": transport,
        "faults": list(faults),
        "link_bytes_per_s": link_bytes_per_s or 0.0,
        "hosts": list(host_names),
    }
    if host_names and len(host_names) != n:
        raise InvalidArgument(
            f"invalid host_names: got {len(host_names)} names, expected one for each of {n} ranks"
        )
    if len(set(host_names)) > 1 and transport not in ("", "tcp"):
        raise InvalidArgument(
            f"transport={transport!r} does not reach other hosts, simulated or not"
        )
    if link_bytes_per_s is not None and not link_bytes_per_s > 0:
        raise InvalidArgument(
            f"invalid link_bytes_per_s: got {link_bytes_per_s}, expected more than 0, or None"
        )
    for fault in faults:
        if not 0 <= fault.rank < n:
            raise InvalidArgument(f"invalid fault: got rank {fault.rank}, expected 0 to {n - 1}")
        if fault.action in ("kill", "stop") and not processes:
            raise InvalidArgument(
                f"the fault {fault.action!r} would end the test: pass processes=True"
            )
    ranks: _Processes | _Threads
    if processes:
        limit_s = EXIT_TIMEOUT_S if exit_timeout_s is None else exit_timeout_s
        ranks = _Processes(n, fn, args, options, limit_s)
    else:
        ranks = _Threads(n, fn, args, options)
    ranks.run()
    if not return_exceptions and ranks.failures:
        first = _first_cause(ranks.failures, ranks.results)
        error: BaseException = ranks.results[first]
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"raised by rank {first} of {n} in run_ranks")
        raise error
    return ranks.results


def _first_cause(failures: list[int], results: list[Any]) -> int:
    """The rank whose failure caused the others; `failures` are ranks in the order of their
    failures.

    A failing rank closes its connections before it reports: a peer that misses it may report first.
    """
    first = failures[0]
    blamed: int | None = getattr(results[first], "peer", None)
    if blamed is not None and blamed in failures and getattr(results[blamed], "peer", None) is None:
        return blamed
    return first


def status(group: Group) -> dict[str, Any]:
    """What this rank knows of the group, without communication. May be called from any thread.

    Args:
        group: a group that is not closed.

    Returns:
        "rank"; "current_call": this rank's last call as text, "" before the first; "peers": for
        each other rank a dict of "rank", "host", "pid", "transport", "connected", "left_reason"
        (why it left, or ""), "last_seen_s" (seconds since its last frame), "current_call" (of its
        last frame, or ""), "bytes_written" and "bytes_received". Up to a fifth of `heartbeat_s`
        old.

    Raises:
        GroupBroken: the group was closed or belongs to the parent process.
    """
    known = group.core.status()
    peers = [
        {
            "rank": rank,
            "host": member.host,
            "pid": member.pid,
            "transport": member.transport,
            **known["peers"][rank],
        }
        for rank, member in enumerate(group.peer_info())
        if rank != group.rank
    ]
    return {"rank": group.rank, "current_call": known["current_call"], "peers": peers}


ACTIONS = ("disconnect", "kill", "stop", "delay", "throttle", "corrupt")


@dataclass(frozen=True)
class FaultPlan:
    """A fault on one rank, after a number of bytes on its channels.

    Args:
        rank: the rank that has the fault.
        action: "disconnect" (closes its connections, as if it died), "kill" (SIGKILL), "stop"
            (SIGSTOP), "delay" (received data is visible `seconds` later), "throttle" (at most
            `chunk_bytes` received bytes are visible at a time), "corrupt" (sends 32 random bytes
            before the next frame).
        at: count the data frames of this operation only; None: all bytes, from the forming on.
        after_bytes: bytes sent and received before the fault, with headers.
        peer: count and act on the channel to this rank only; None: on all.
        seconds: of a delay.
        chunk_bytes: bytes that a throttled channel shows at a time.
        timestamp_file: the rank writes time.monotonic() of the fault (noise: of its sending) to
            this file before the others can notice it; "": none.

    The fault affects the group that run_ranks makes. Subgroups of split() have channels of their
    own, without counting or faults; a killed or stopped rank is so in all groups.

    Raises:
        InvalidArgument: there is no such action or operation, or chunk_bytes is below 1.
    """

    rank: int
    action: str
    at: str | None = None
    after_bytes: int = 0
    peer: int | None = None
    seconds: float = 0.01
    chunk_bytes: int = 1
    timestamp_file: str = ""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise InvalidArgument(
                f"invalid action: got {self.action!r}, expected one of {', '.join(ACTIONS)}"
            )
        if self.at is not None and self.at not in _core.OPERATIONS:
            raise InvalidArgument(
                f"invalid at: got {self.at!r}, expected one of {', '.join(_core.OPERATIONS)}"
            )
        if self.chunk_bytes < 1:
            raise InvalidArgument(
                f"invalid chunk_bytes: got {self.chunk_bytes}, expected 1 or more"
            )

    def _for_core(self) -> tuple[str, str, int, int, float, int, str]:
        peer = -1 if self.peer is None else self.peer
        named = self.action, self.at or "", self.after_bytes, peer
        return *named, self.seconds, self.chunk_bytes, self.timestamp_file


def _join(store: _core.Store, rank: int, options: dict[str, Any]) -> Group:
    """Connects this rank to the group."""
    key = options.get("secret", "")
    named = {"name": "world", "address": "", "route_hint": "", "reproducible": False, "log": False}
    options = dict(options)
    hosts = options.pop("hosts", ())
    faults = [fault._for_core() for fault in options.get("faults", ()) if fault.rank == rank]
    given = {**named, **config.flight_recorder_files(), "secret": key, **options, "faults": faults}
    if hosts:
        given["host"] = hosts[rank]
    core = _core.connect(store, rank=rank, **given)
    return Group(core, store, options["timeout_s"])


class _Threads:
    """Ranks as threads that meet in an in-memory store."""

    def __init__(
        self, n: int, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.results: list[Any] = [None] * n
        self.failures: list[int] = []  # ranks, in the order in which they failed
        key = {"secret": secrets.token_hex(32)} if options["encrypt"] else {}
        self._fn, self._args, self._options = fn, args, {**options, **key}
        self._store = _core.LocalStore()
        self._groups: list[Group] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        """Returns when every rank has ended."""
        threads = [
            threading.Thread(target=self._one, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(len(self.results))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C
            self._abort(f"the test was stopped: {type(error).__name__}")
            raise

    def _one(self, rank: int) -> None:
        try:
            group = _join(self._store, rank, self._options)
            with self._lock:
                self._groups.append(group)
            with as_thread_default(group):
                self.results[rank] = self._fn(group, *self._args)
            group.close()
        except BaseException as error:  # of any kind: raised in the caller
            with self._lock:
                self.failures.append(rank)
            self.results[rank] = error
            self._abort(f"rank {rank} failed: {type(error).__name__}: {error}")

    def _abort(self, reason: str) -> None:
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            group.abort(reason)


class _Processes:
    """Ranks as processes that meet in a store of this process; pipes return the results."""

    def __init__(
        self,
        n: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
        exit_timeout_s: float,
    ) -> None:
        self.results: list[Any] = [None] * n
        self.failures: list[int] = []
        self._job = pickle.dumps((fn, args))
        self._options = {**options, "secret": secrets.token_hex(32)}
        self._exit_timeout_s = exit_timeout_s

    def run(self) -> None:
        """Returns when every rank has ended; after a failure kills those that do not."""
        server = _core.TcpStore.serve("127.0.0.1", 0, self._options["secret"])
        context = mp.get_context("spawn")
        running: dict[Connection, tuple[int, Any]] = {}
        started: list[Any] = []
        try:
            for rank in range(len(self.results)):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (theirs, server.port, rank, self._options, self._job)
                process = context.Process(target=_rank_process, args=arguments, daemon=True)
                process.start()
                theirs.close()
                started.append(process)
                running[ours] = (rank, process)
            self._collect(running)
        finally:
            for process in started:
                process.kill()
                process.join()

    def _collect(self, running: dict[Connection, tuple[int, Any]]) -> None:
        end: float | None = None  # no limit before something has failed
        while running:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = wait(list(running), left)
            if not ready:
                for rank, _ in running.values():
                    self._fail(rank, Timeout(f"rank {rank} did not exit after another rank failed"))
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank, process = running.pop(pipe)
                self._receive(rank, process, pipe)
            if self.failures and end is None:
                end = time.monotonic() + self._exit_timeout_s

    def _receive(self, rank: int, process: Any, pipe: Connection) -> None:
        try:
            failed, value = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the process ended without an answer
            process.join()
            how = f"rank {rank} (pid {process.pid}) ended with exit code {process.exitcode}"
            failed, value = True, PeerLost(how, peer=rank)
        if failed:
            self._fail(rank, value)
        else:
            self.results[rank] = value

    def _fail(self, rank: int, error: BaseException) -> None:
        self.failures.append(rank)
        self.results[rank] = error


def _rank_process(
    pipe: Connection, port: int, rank: int, options: dict[str, Any], job: bytes
) -> None:
    """The main function of a rank's process: joins, runs the function, sends the result."""
    group: Group | None = None
    try:
        fn, args = pickle.loads(job)
        store = _core.TcpStore.connect("127.0.0.1", port, options["secret"], options["timeout_s"])
        group = _join(store, rank, options)
        with as_thread_default(group):
            answer = pickle.dumps((False, fn(group, *args)))
        group.close()
    except BaseException as error:  # of any kind: raised in the caller
        if group is not None:
            group.abort(f"rank {rank} failed: {type(error).__name__}: {error}")
        answer = _pickled(error)
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(answer)


def _pickled(error: BaseException) -> bytes:
    """A failure as bytes; an error that cannot be pickled becomes an Error of the same text."""
    try:
        answer = pickle.dumps((True, error))
        pickle.loads(answer)
    except Exception:  # of the error's own __reduce__ or __init__, which may raise anything
        answer = pickle.dumps((True, Error(f"{type(error).__name__}: {error}")))
    return answer
