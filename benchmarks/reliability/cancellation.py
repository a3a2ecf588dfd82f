"""`python -m benchmarks cancellation`: the time from Ctrl-C to the end of every kind of wait.

Each wait has its own process: the main thread waits for ranks that are threads beside it, or for a
store; another thread sends SIGINT as a terminal does. Exits with 1 if a wait took longer than
docs/errors.md guarantees.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import pycomm
from pycomm import Group, _core
from pycomm.testing import FaultPlan
from pycomm.testing.threads import join

PROMISED_MS = 200.0
DEEP_S = 0.5  # until the main thread waits; if it does not yet, it ends even sooner
LIMIT_S = 60.0  # of one process
KEY = "the key of a run"

Wait = Callable[[], object]
Others = Callable[[Group], object]


def _group(size: int, others: Others, transport: str = "tcp", **more: Any) -> Group:
    """Rank 0 of a group whose other ranks are threads that run `others`."""
    store = _core.LocalStore()
    options = {"size": size, "timeout_s": LIMIT_S, "transport": transport, "secret": KEY, **more}
    for rank in range(1, size):
        threading.Thread(target=_rank, args=(store, rank, options, others), daemon=True).start()
    return join(store, 0, options)


def _rank(store: _core.Store, rank: int, options: dict[str, Any], others: Others) -> None:
    group = join(store, rank, options)
    others(group)
    threading.Event().wait()  # keeps the group: its end would close it


def _idle(group: Group) -> None:
    """The body of a rank that never calls."""


def _blocked_all_reduce() -> Wait:
    group = _group(2, _idle)
    return lambda: pycomm.all_reduce(np.ones(4), group=group)


def _blocked_inside_a_host() -> Wait:
    group = _group(2, _idle, "shm")
    return lambda: pycomm.all_reduce(np.ones(1 << 20), group=group)


def _blocked_barrier() -> Wait:
    group = _group(2, _idle, "local")
    return lambda: pycomm.barrier(group=group)


def _blocked_send() -> Wait:
    group = _group(2, _idle)
    return lambda: [pycomm.send(np.ones(1 << 20), 1, group=group) for _ in range(1000)]


def _trickled(call: Callable[[Group, Any], object]) -> Wait:
    """The bytes of the peer arrive one at a time, so the call does not end."""
    x = np.ones(1 << 24, np.float32)
    fault = FaultPlan(0, "throttle")
    group = _group(2, lambda other: call(other, x.copy()), faults=[fault])
    return lambda: call(group, x)


def _trickled_broadcast() -> Wait:
    return _trickled(lambda group, x: pycomm.broadcast(x, 1, group=group))


def _trickled_message() -> Wait:
    return _trickled(
        lambda group, x: (
            pycomm.send(x, 0, group=group) if group.rank else pycomm.recv(x, 1, group=group)
        )
    )


def _waiting_for_work() -> Wait:
    group = _group(2, _idle)
    work = pycomm.all_reduce(np.ones(4), group=group, async_op=True)
    return lambda: (work.wait(), group)  # keeps the group until then


def _forming(store: Any) -> Wait:
    """No other rank joins."""
    options = {"size": 2, "timeout_s": LIMIT_S, "transport": "tcp", "secret": KEY}
    return lambda: join(store, 0, options)


def _forming_in_a_store_of_ours() -> Wait:
    return _forming(_core.TcpStore.serve("127.0.0.1", 0, KEY))


def _forming_in_a_store_of_torch() -> Wait:
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs hide it

    from pycomm._bootstrap.rendezvous import TorchStore

    return _forming(TorchStore(HashStore()))


class _Echo:
    """A store in Python in which rank 1's entries copy rank 0's: it will not connect."""

    def __init__(self) -> None:
        self._store = _core.LocalStore()
        self.set, self.add, self.remove = self._store.set, self._store.add, self._store.remove
        self.claim, self.settle = self._store.claim, self._store.settle

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._store.get(key.replace("/note/1", "/note/0"), timeout_s)


def _forming_with_one_that_does_not_call() -> Wait:
    return _forming(_Echo())


def _splitting() -> Wait:
    group = _group(2, _idle)
    return lambda: group.split(0)


def _shrinking() -> Wait:
    """The others are alive but do not call."""
    group = _group(3, _idle)
    return group.shrink


def _nobody_serves() -> Wait:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return lambda: _core.TcpStore.connect("127.0.0.1", port, KEY, LIMIT_S)


def _store_is_stopped() -> Wait:
    """The process that serves the store is stopped."""
    serve = "import sys; from pycomm import _core; "
    serve += f"s = _core.TcpStore.serve('127.0.0.1', 0, {KEY!r}); "
    serve += "print(s.port, flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, "-c", serve], stdin=pipe, stdout=pipe)
    assert server.stdout is not None
    store = _core.TcpStore.connect("127.0.0.1", int(server.stdout.readline()), KEY, LIMIT_S)
    os.kill(server.pid, signal.SIGSTOP)
    os.waitpid(server.pid, os.WUNTRACED)
    stopped.append(server)
    return lambda: store.set("key", b"value")


stopped: list[subprocess.Popen[bytes]] = []  # processes, to be killed at the end

WAITS: dict[str, Callable[[], Wait]] = {
    "all_reduce": _blocked_all_reduce,
    "all_reduce inside a host": _blocked_inside_a_host,
    "barrier": _blocked_barrier,
    "send without a receiver": _blocked_send,
    "throttled broadcast": _trickled_broadcast,
    "throttled message": _trickled_message,
    "Work.wait": _waiting_for_work,
    "forming": _forming_in_a_store_of_ours,
    "forming, torch's store": _forming_in_a_store_of_torch,
    "forming, absent peer": _forming_with_one_that_does_not_call,
    "split": _splitting,
    "shrink": _shrinking,
    "store without a server": _nobody_serves,
    "stopped store": _store_is_stopped,
}


def took_ms(name: str) -> float:
    """Milliseconds from the signal to the KeyboardInterrupt in the wait of this name.

    Raises:
        RuntimeError: the wait ended in another way; TimeoutExpired: it did not end.
    """
    command = [sys.executable, "-m", "benchmarks.reliability.cancellation", name]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
        cwd=Path(__file__).resolve().parent.parent.parent,
    )
    if done.returncode or not done.stdout.startswith("took "):
        raise RuntimeError(f"{name}: {done.stdout}{done.stderr}")
    return float(done.stdout.split()[1])


def _interrupted(name: str) -> None:
    """Runs in its own process: waits, and prints how long it waited after the signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT
    wait = WAITS[name]()
    sent_at: list[float] = []

    def send() -> None:
        sent_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(DEEP_S, send)
    timer.start()
    try:
        wait()
    except KeyboardInterrupt:  # the measured event
        print("took", 1e3 * (time.monotonic() - sent_at[0]), flush=True)
    for server in stopped:
        server.kill()
    os._exit(0)  # the threads of the other ranks never end


@dataclass(frozen=True)
class Row:
    """One kind of wait."""

    wait: str
    median_ms: float
    worst_ms: float
    rounds: int


def main(argv: Sequence[str]) -> int:
    """Interrupts, prints, stores; returns the exit status."""
    parser = argparse.ArgumentParser(prog="pycomm bench cancellation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=5, help="of each wait (%(default)s)")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    options = parser.parse_args(argv)
    console = Console(soft_wrap=True, highlight=False)
    rows = []
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=options.rounds * len(WAITS))
        for name in WAITS:
            bar.update(task, description=name)
            times = []
            for _ in range(options.rounds):
                times.append(took_ms(name))
                bar.advance(task)
            rows.append(Row(name, statistics.median(times), max(times), len(times)))
    shown = Table()
    shown.add_column("Ctrl-C in")
    for column in ("median ms", "worst"):
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(row.wait, f"{row.median_ms:.1f}", f"{row.worst_ms:.1f}")
    console.print(shown)
    if options.json:
        from pycomm.bench.support import machine, summaries

        content = {"machine": machine.describe(), "rows": [vars(row) for row in rows]}
        summaries.write(options.json, content)
    return 1 if any(row.worst_ms > PROMISED_MS for row in rows) else 0


if __name__ == "__main__":
    _interrupted(sys.argv[1])
