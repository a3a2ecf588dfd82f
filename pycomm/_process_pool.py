"""Spawned processes, each of which sends back one pickled answer: a result or a failure."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import pickle
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from pycomm.errors import Error


class ProcessPool:
    """The processes of one call. Leaving its context kills those that still run.

    Attributes:
        results: by process number.
        failures: the same for failures, in the order in which they arrived.
    """

    def __init__(self, exit_timeout_s: float, failure_of_exit: Callable[[int, Any], Any]) -> None:
        """`exit_timeout_s` is the limit of the others after a failure; `failure_of_exit` makes the
        failure of a process that ended without an answer, from its number and the process."""
        self.results: dict[int, Any] = {}
        self.failures: dict[int, Any] = {}
        self._exit_timeout_s, self._failure_of_exit = exit_timeout_s, failure_of_exit
        self._context = mp.get_context("spawn")
        self._started: list[Any] = []
        self._running: dict[Connection, tuple[int, Any]] = {}

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.join()

    def start(self, main: Callable[..., None], *args: Any) -> None:
        """Starts the next process, which calls main(pipe, *args) and send_answer(pipe, ...)."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=main, args=(theirs, *args))
        process.start()
        theirs.close()
        self._running[ours] = len(self._started), process
        self._started.append(process)

    def collect(self) -> list[int]:
        """Waits for the answers; returns the processes that sent none in time after a failure."""
        end: float | None = None  # no limit before something has failed
        while self._running:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = wait(list(self._running), left)
            if not ready:
                return [number for number, _ in self._running.values()]
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._receive(*self._running.pop(pipe), pipe)
            if self.failures and end is None:
                end = time.monotonic() + self._exit_timeout_s
        return []

    def _receive(self, number: int, process: Any, pipe: Connection) -> None:
        try:
            failed, value = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the process ended without an answer
            process.join()
            failed, value = True, self._failure_of_exit(number, process)
        (self.failures if failed else self.results)[number] = value


def send_answer(pipe: Connection, answer: bytes) -> None:
    """Sends a pickled (whether it failed, result or failure) to the process of the pool."""
    with contextlib.suppress(BrokenPipeError):  # the pool does not wait any more
        pipe.send_bytes(answer)


def picklable(error: BaseException) -> BaseException:
    """The error, or an Error of the same text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of the error's own __reduce__ or __init__, which may raise anything
        return Error(f"{type(error).__name__}: {error}")
    return error
