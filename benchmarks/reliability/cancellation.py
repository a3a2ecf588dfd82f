"""`python -m benchmarks cancellation`: the time from Ctrl-C to the end of every kind of wait.

Each wait has its own process: the main thread waits for ranks that are threads beside it, or for a
store; another thread sends SIGINT as a terminal does. Exits with 1 if a wait took longer than
docs/errors.md guarantees. The native suite `patience` interrupts calls that busy peers prolong.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import pycomm
from benchmarks.support import command
from benchmarks.support.ports import free_port
from pycomm import Group, _core
from pycomm.testing.threads import join

PROMISED_MS = 200.0
DEEP_S = 0.5  # until the main thread waits; if it does not yet, it ends even sooner
LIMIT_S = 60.0  # of one wait
KEY = "the key of a run"

Wait = Callable[[], object]
Call = Callable[[Group], object]


def _alone(call: Call, size: int = 2, transport: str = "tcp") -> Wait:
    """Rank 0 of a group whose other ranks, threads, are alive but do not call."""
    store = _core.LocalStore()
    options = {"size": size, "timeout_s": LIMIT_S, "transport": transport, "secret": KEY}
    for rank in range(1, size):
        threading.Thread(target=_idle_rank, args=(store, rank, options), daemon=True).start()
    group = join(store, 0, options)
    return lambda: call(group)


def _idle_rank(store: _core.Store, rank: int, options: dict[str, Any]) -> None:
    with contextlib.suppress(pycomm.errors.GroupBroken):  # rank 0 may call shrink() before
        _group = join(store, rank, options)
    threading.Event().wait()  # keeps the group: its end would close it


def _send(group: Group) -> None:
    for _ in range(1000):
        pycomm.send(np.ones(1 << 20), 1, group=group)


def _forming(store: Any) -> Wait:
    """No other rank joins."""
    options = {"size": 2, "timeout_s": LIMIT_S, "transport": "tcp", "secret": KEY}
    return lambda: join(store, 0, options)


def _forming_in_a_store_of_torch() -> Wait:
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs hide it

    from pycomm._bootstrap.rendezvous import TorchStore

    return _forming(TorchStore(HashStore()))


class _Echo:
    """A store in Python in which rank 1's entries copy rank 0's: it will not connect."""

    def __init__(self) -> None:
        self._store = _core.LocalStore()
        self.set, self.add, self.remove = self._store.set, self._store.add, self._store.remove
        self.claim, self.all_ranks_connected = self._store.claim, self._store.all_ranks_connected

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._store.get(key.replace("/rank_info/1", "/rank_info/0"), timeout_s)


def _connect(port: int) -> _core.TcpStore:
    return _core.TcpStore.connect("127.0.0.1", port, KEY, LIMIT_S)


def _silent_store() -> Wait:
    """A listener accepts the connection and does not answer."""
    listener = socket.create_server(("127.0.0.1", 0))
    return lambda: _connect(listener.getsockname()[1])


WAITS: dict[str, Callable[[], Wait]] = {
    "all_reduce": lambda: _alone(lambda group: pycomm.all_reduce(np.ones(4), group=group)),
    "all_reduce inside a host": lambda: _alone(
        lambda group: pycomm.all_reduce(np.ones(1 << 20), group=group), transport="shm"
    ),
    "send without a receiver": lambda: _alone(_send),
    "Work.wait": lambda: _alone(
        lambda group: pycomm.all_reduce(np.ones(4), group=group, async_op=True).wait()
    ),
    "forming": lambda: _forming(_core.TcpStore.serve("127.0.0.1", 0, KEY)),
    "forming, torch's store": _forming_in_a_store_of_torch,
    "forming, absent peer": lambda: _forming(_Echo()),
    "split": lambda: _alone(lambda group: group.split(0)),
    "shrink": lambda: _alone(Group.shrink, size=3),
    "store without a server": lambda: lambda: _connect(free_port()),
    "silent store": _silent_store,
}


def took_ms(name: str) -> float:
    """Milliseconds from the signal to the KeyboardInterrupt in the wait of this name.

    Raises:
        CalledProcessError: the wait ended in another way.
        TimeoutExpired: it did not end.
    """
    made = [sys.executable, "-m", "benchmarks.reliability.cancellation", name]
    return float(subprocess.check_output(made, cwd=command.ROOT, timeout=2 * LIMIT_S))


def _interrupted(name: str) -> None:
    """Runs in its own process: waits, and answers how long it waited after the signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT
    wait = WAITS[name]()
    sent_at: list[float] = []

    def send() -> None:
        sent_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(DEEP_S, send).start()
    try:
        wait()
    except KeyboardInterrupt:  # the measured event
        print(1e3 * (time.monotonic() - sent_at[0]), flush=True)
        os._exit(0)  # the threads of the other ranks never end
    os._exit(1)


def main(argv: Sequence[str]) -> int:
    """Interrupts, prints, stores; returns the exit status."""
    parser = command.parser("cancellation", __doc__, rounds=(5, "of each wait"))
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for name in command.progress(WAITS, "Ctrl-C in waits"):
        times = [took_ms(name) for _ in range(options.rounds)]
        figures = {"median_ms": statistics.median(times), "worst_ms": max(times)}
        rows.append({"wait": name, **figures, "rounds": len(times)})
    command.report(options.json, rows=rows)
    return 1 if any(row["worst_ms"] > PROMISED_MS for row in rows) else 0


if __name__ == "__main__":
    _interrupted(sys.argv[1])
