"""Ranks as processes."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import pickle
import secrets
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from pycomm import _core
from pycomm.default_group import as_thread_default
from pycomm.errors import Error, PeerLost, Timeout
from pycomm.group import Group
from pycomm.testing.threads import join

__all__ = ["ProcessRanks"]


class ProcessRanks:
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
        group = join(store, rank, options)
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
