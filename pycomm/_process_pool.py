"""Spawned processes that send back pickled messages, and one answer: a result or a failure."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from pycomm.errors import Error

PR_SET_PDEATHSIG = 1


class RankFailed(Error):
    """A rank that a command started failed; the text contains its traceback."""


class ProcessPool:
    """The processes of one call. Leaving its context, and the end of this process, kill them.

    Attributes:
        results: by process number.
        failures: the same for failures, in the order in which they arrived.
    """

    def __init__(
        self,
        exit_timeout_s: float,
        failure_of_exit: Callable[[int, Any], Any],
        on_message: Callable[[int, Any], None] = lambda number, value: None,
    ) -> None:
        """`exit_timeout_s` is the limit of the others after a failure; `failure_of_exit` makes the
        failure of a process that ended without an answer, from its number and the process;
        `on_message` takes the number and the message of a process."""
        self.results: dict[int, Any] = {}
        self.failures: dict[int, Any] = {}
        self._exit_timeout_s, self._failure_of_exit = exit_timeout_s, failure_of_exit
        self._on_message = on_message
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
        process = self._context.Process(target=_enter, args=(main, theirs, *args))
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
            if not ready or left == 0:  # others may still send messages
                return [number for number, _ in self._running.values()]
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._receive(*self._running[pipe], pipe)
            if self.failures and end is None:
                end = time.monotonic() + self._exit_timeout_s
        return []

    def _receive(self, number: int, process: Any, pipe: Connection) -> None:
        try:
            failed, value = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the process ended without an answer
            process.join()
            failed, value = True, self._failure_of_exit(number, process)
        if failed is None:
            self._on_message(number, value)
            return
        del self._running[pipe]
        (self.failures if failed else self.results)[number] = value


def _enter(main: Callable[..., None], *args: Any) -> None:
    die_with(os.getppid())
    main(*args)


def die_with(parent: int) -> None:
    """Ends this process when its parent process ends, also within C++ code."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before prctl
        sys.exit("pycomm: the launcher ended")


def send_answer(pipe: Connection, answer: bytes) -> None:
    """Sends a pickled (whether it failed, result or failure), or (None, message), to the pool."""
    with contextlib.suppress(BrokenPipeError):  # the pool does not wait any more
        pipe.send_bytes(answer)


def picklable(error: BaseException) -> BaseException:
    """The error, or an Error of the same text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of the error's own __reduce__ or __init__, which may raise anything
        return Error(f"{type(error).__name__}: {error}")
    return error
