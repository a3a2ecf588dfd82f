"""Ranks on one machine, for tests: as threads of this process or as processes of their own.

    def sums(group, n):
        return pycomm.all_reduce(np.full(n, group.rank), group=group)

    results = run_ranks(4, sums, 1000)

The group is also the default group of the rank's thread. `status` and `FaultPlan` are not built
yet: they raise Unsupported.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import pickle
import secrets
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from pycomm import _core
from pycomm.errors import Error, PeerLost, Timeout, Unsupported
from pycomm.group import Group, as_thread_default

__all__ = ["FaultPlan", "run_ranks", "status"]

GRACE_S = 5.0  # for the others to end by themselves after the first failure


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    transport: str = "local",
    processes: bool = False,
    timeout_s: float = 60.0,
    heartbeat_s: float = 10.0,
    return_exceptions: bool = False,
) -> list[Any]:
    """Runs `fn(group, *args)` as each of `n` ranks of a new group; gives the results by rank.

    Args:
        n: how many ranks.
        fn: what each rank does; with `processes` it must be importable, as its results picklable.
        transport: "local" (threads only), "shm", "tcp", or "" for the best.
        processes: each rank is a process, started afresh, instead of a thread.
        timeout_s: the group's limit in seconds, for its forming and each call.
        heartbeat_s: as of `pycomm.init`.
        return_exceptions: failures stand in the list as exceptions; PeerLost for a process that
            died.

    Raises:
        The first failure of any rank, with a note that names the rank; the other ranks' groups are
        aborted then, so that nobody waits.
    """
    options = {
        "size": n,
        "timeout_s": timeout_s,
        "heartbeat_s": heartbeat_s,
        "transport": transport,
    }
    ranks = (_Processes if processes else _Threads)(n, fn, args, options)
    ranks.run()
    if not return_exceptions and ranks.failures:
        first = ranks.failures[0]
        error: BaseException = ranks.results[first]
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"raised by rank {first} of {n} in run_ranks")
        raise error
    return ranks.results


def status(group: Group) -> NoReturn:
    """Not built yet."""
    raise Unsupported("status is not built yet; group.stats() and group.members are there")


class FaultPlan:
    """Not built yet."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise Unsupported("FaultPlan is not built yet; os.kill in a rank that is a process is")


def _join(store: _core.Store, rank: int, options: dict[str, Any]) -> Group:
    """This rank's place in the group."""
    key = options.get("secret", "")
    named = {"name": "world", "address": "", "towards": "", "reproducible": False, "log": False}
    core = _core.connect(store, rank=rank, **{**named, "secret": key, **options})
    return Group(core, store, options["timeout_s"])


class _Threads:
    """Ranks as threads that meet in a store in memory."""

    def __init__(
        self, n: int, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.results: list[Any] = [None] * n
        self.failures: list[int] = []  # ranks, in the order in which they failed
        self._fn, self._args, self._options = fn, args, options
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
        except BaseException as error:
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
    """Ranks as processes that meet in a store served by this one; results come through pipes."""

    def __init__(
        self, n: int, fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.results: list[Any] = [None] * n
        self.failures: list[int] = []
        self._job = pickle.dumps((fn, args))
        self._options = {**options, "secret": secrets.token_hex(32)}

    def run(self) -> None:
        """Returns when every rank has ended; those that do not after a failure are killed."""
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
                    self._fail(rank, Timeout(f"rank {rank} went on after another had failed"))
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank, process = running.pop(pipe)
                self._receive(rank, process, pipe)
            if self.failures and end is None:
                end = time.monotonic() + GRACE_S

    def _receive(self, rank: int, process: Any, pipe: Connection) -> None:
        try:
            failed, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
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
    """What one process does: joins, runs the job, reports."""
    group: Group | None = None
    try:
        fn, args = pickle.loads(job)
        store = _core.TcpStore.connect("127.0.0.1", port, options["secret"], options["timeout_s"])
        group = _join(store, rank, options)
        with as_thread_default(group):
            answer = pickle.dumps((False, fn(group, *args)))
        group.close()
    except BaseException as error:
        if group is not None:
            group.abort(f"rank {rank} failed: {type(error).__name__}: {error}")
        answer = _pickled(error)
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(answer)


def _pickled(error: BaseException) -> bytes:
    """A failure as bytes; one that cannot travel becomes an Error of the same text."""
    try:
        answer = pickle.dumps((True, error))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps((True, Error(f"{type(error).__name__}: {error}")))
    return answer
