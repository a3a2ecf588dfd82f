"""Ranks as processes."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from pycomm import _core
from pycomm._process_pool import ProcessPool, picklable, send_answer
from pycomm.default_group import as_thread_default
from pycomm.errors import PeerLost, Timeout
from pycomm.group import Group
from pycomm.testing.threads import join


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
        with ProcessPool(self._exit_timeout_s, _lost) as pool:
            for rank in range(len(self.results)):
                pool.start(_rank_process, server.port, rank, self._options, self._job)
            for rank in pool.collect():
                text = f"rank {rank} did not exit after another rank failed"
                pool.failures[rank] = Timeout(text)
        self.failures = list(pool.failures)
        for rank, value in (pool.results | pool.failures).items():
            self.results[rank] = value


def _lost(rank: int, process: Any) -> PeerLost:
    how = f"rank {rank} (pid {process.pid}) ended with exit code {process.exitcode}"
    return PeerLost(how, peer=rank)


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
        answer = pickle.dumps((True, picklable(error)))
    send_answer(pipe, answer)
