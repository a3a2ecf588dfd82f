"""Unauthenticated clients that connect to all listeners of a test run while the tests run.

One process for a run, at the lowest priority: `python tests/support/attack.py PID`, where PID is
pytest's. It connects to the listeners of pycomm in all processes that pytest started, and to no
others. It recognizes TCP sockets by their backlog (kBacklog in csrc/os/socket.h) and Unix sockets
by their name. If the system caps the backlog below kBacklog, TCP listeners cannot be recognized,
and the run says so. Listeners of gloo, MPI and torch's own store are excluded, since an
unauthenticated client can stop them; so are those in other network namespaces. A test with the mark
`no_attack` states why it is excluded: for example the native suites, which join ranks without a
handshake.

conftest.py starts it through AttackPlugin. The run fails if an unauthenticated client was accepted,
or if there were many listeners and none was reached. `--no-attack` disables it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from paths import ROOT

from benchmarks.support.unauthenticated import (
    MANNERS,
    Address,
    UnauthenticatedClients,
    inodes,
    listeners,
    unix_sockets,
    with_descendants,
)

BACKLOG = 4093  # kBacklog in csrc/os/socket.h
SOMAXCONN = Path("/proc/sys/net/core/somaxconn")  # the backlog if a larger one was requested
UNIX, NO_ATTACK = "pycomm-", "pycomm_no_attack-"  # prefixes: of listeners, of processes to skip
ROUND_S = 0.02
PAUSE = 19.0  # of the duration of a round: the attack takes at most a 20th of a processor
MAX_CONNECTIONS = 200  # to one listener, so that a long-lived one is not called endlessly
MANY = 50  # with this many listeners at least one is reached
LOWEST = 19
END_S = 60.0


@dataclass
class Result:
    """What the unauthenticated clients did."""

    listeners: int = 0
    connected: int = 0
    refused: int = 0  # usually since the listener was closed
    let_in: int = 0

    def fault(self) -> str:
        """The reason why this result fails the run, or ""."""
        if self.let_in:
            return f"{self.let_in} unauthenticated clients were let in"
        if self.listeners >= MANY and not self.connected:
            return f"unauthenticated clients reached none of {self.listeners} listeners"
        return ""


def unrecognizable() -> str:
    """The reason why pycomm's TCP listeners cannot be recognized here, or ""."""
    most = int(SOMAXCONN.read_text())
    if most >= BACKLOG:
        return ""
    return (
        f"needs net.core.somaxconn to be {BACKLOG} or more, not {most}: no TCP listener is called"
    )


class AttackPlugin:
    """pytest plugin: runs the unauthenticated clients from the first test to the last."""

    def __init__(self) -> None:
        self.fault = self.summary = ""
        self._process: subprocess.Popen[str] | None = None

    def pytest_sessionstart(self) -> None:
        """Starts the clients."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},  # for benchmarks
            start_new_session=True,  # Ctrl-C is for the tests
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Ends the clients, and fails the run if necessary."""
        if self._process is None:
            return
        try:
            text, _ = self._process.communicate(timeout=END_S)
            found = Result(**json.loads(text))
        except (ValueError, subprocess.TimeoutExpired):  # the process failed: reported as such
            self._process.kill()
            self.fault = "the unauthenticated clients have failed"
        else:
            self.fault = found.fault()
            self.summary = (
                f"{found.connected} connections to {found.listeners} listeners, "
                f"{found.refused} refused, {found.let_in} let in"
            )
        if self.fault and session.exitstatus in OTHERWISE_WELL:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Reports the result."""
        if self.summary:
            terminalreporter.section("clients")
            terminalreporter.line(self.summary)
            if why := unrecognizable():
                terminalreporter.line(why)
        if self.fault:
            terminalreporter.line(f"FAILED {self.fault}")


OTHERWISE_WELL = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


@contextlib.contextmanager
def no_attack() -> Iterator[None]:
    """Excludes this process, and those that it starts, from the attack meanwhile."""
    with socket.socket(socket.AF_UNIX) as sign:
        sign.bind(f"\0{NO_ATTACK}{os.getpid()}")
        yield


class Attack:
    """Connects repeatedly to the listeners of `pid` and its descendants."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._calls: Counter[int] = Counter()  # by inode: listeners of this run
        self._foreign: set[int] = set()  # inodes of other listeners
        self._clients = UnauthenticatedClients()

    def round(self) -> None:
        """Connects to each listener once, and to each new one in every way at once."""
        found = self._listeners_of_run()
        for inode, address in found.items():
            times = 1 if self._calls[inode] else len(MANNERS)
            if self._calls[inode] < MAX_CONNECTIONS:
                self._calls[inode] += times
                for _ in range(times):
                    self._clients.call(address)
        self._clients.go_on()

    @property
    def listeners(self) -> int:
        """The number of listeners that were reached."""
        return sum(calls > 0 for calls in self._calls.values())

    def end(self) -> Result:
        """Closes the connections and returns the result."""
        self._clients.go_on()
        self._clients.close()
        made = self._clients
        return Result(self.listeners, made.connected, made.refused, made.let_in)

    def _listeners_of_run(self) -> dict[int, Address]:
        """The listeners of this run, without those of excluded processes."""
        tcp = {i: one.address for i, one in listeners().items() if one.backlog == BACKLOG}
        # Read after the others: an excluded process marks itself before it listens.
        signs = {int(name.removeprefix(NO_ATTACK)) for name, _ in unix_sockets(NO_ATTACK).values()}
        marked = signs & with_descendants(self._pid) if signs else signs
        spared = inodes(pid for one in marked for pid in with_descendants(one))
        unix = {i: "\0" + name for i, (name, listens) in unix_sockets(UNIX).items() if listens}
        some: dict[int, Address] = {**tcp, **unix}
        if some.keys() - self._calls.keys() - self._foreign:
            self._foreign = some.keys() - inodes(with_descendants(self._pid))
        return {i: address for i, address in some.items() if i not in self._foreign | spared}


def main(pid: int) -> None:
    """Attacks until standard input is closed."""
    os.nice(LOWEST)
    attack, pause_s = Attack(pid), ROUND_S
    while not select.select([sys.stdin], [], [], pause_s)[0]:
        begin = time.process_time()
        attack.round()
        pause_s = max(ROUND_S, PAUSE * (time.process_time() - begin))
    print(json.dumps(attack.end().__dict__))


if __name__ == "__main__":
    main(int(sys.argv[1]))
