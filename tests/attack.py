"""Unauthenticated clients that call while the tests run, wherever the run listens at that moment.

One process for a run, at the lowest priority: `python -m tests.attack PID`, PID being pytest's. It
calls the listeners of pycomm in all processes that pytest has started, and nobody else's: TCP
sockets by the number of callers that they let wait (kBacklog in csrc/os/socket.h; where the system
lets no listener have so many they cannot be told, which the run then says), Unix sockets by their
name. gloo, MPI and torch's own store, which an unauthenticated client can stop, are not called. Nor
is who listens in another network namespace. A test that has the mark `no_attack` says why it must
be spared: the native suites among them, which join ranks without a handshake.

conftest.py starts it through AttackPlugin, which fails the run where an unauthenticated client was
let in, or where there was much to reach and nothing was reached. `--no-attack` leaves it out.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.unauthenticated import (
    MANNERS,
    Address,
    UnauthenticatedClients,
    descendants,
    inodes,
    listeners,
    unix_sockets,
)

REPOSITORY = Path(__file__).resolve().parent.parent
BACKLOG = 4093  # kBacklog in csrc/os/socket.h
SOMAXCONN = Path("/proc/sys/net/core/somaxconn")  # so many callers may wait, whatever is asked for
UNIX, NO_ATTACK = (
    "pycomm-",
    "pycomm_no_attack-",
)  # how names begin: of listeners, of a process to be spared
ROUND_S = 0.02
MOST = 200  # calls of one listener, so that one that stands for long is not called for ever
MANY = 50  # listeners: of so many one at least is reached
LOWEST = 19
END_S = 60.0


@dataclass
class Found:
    """What the unauthenticated clients did."""

    listeners: int = 0
    stood: int = 0
    refused: int = 0  # mostly as the listener was gone again
    let_in: int = 0

    def fault(self) -> str:
        """What is wrong with it, or ""."""
        if self.let_in:
            return f"{self.let_in} unauthenticated clients were let in"
        if self.listeners >= MANY and not self.stood:
            return f"unauthenticated clients reached none of {self.listeners} listeners"
        return ""


def blind() -> str:
    """Why no TCP listener of ours can be told from others' here, or ""."""
    most = int(SOMAXCONN.read_text())
    if most >= BACKLOG:
        return ""
    return (
        f"needs net.core.somaxconn to be {BACKLOG} or more, not {most}: no TCP listener is called"
    )


class AttackPlugin:
    """pytest's plugin: has the unauthenticated clients call from the first test to the last."""

    def __init__(self) -> None:
        self.fault = self.told = ""
        self._process: subprocess.Popen[str] | None = None

    def pytest_sessionstart(self) -> None:
        """Begins."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attack", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            start_new_session=True,  # Ctrl-C is for the tests
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Ends, and fails the run where it must."""
        if self._process is None:
            return
        try:
            text, _ = self._process.communicate(timeout=END_S)
            found = Found(**json.loads(text))
        except (ValueError, subprocess.TimeoutExpired):  # it has failed: that is told
            self._process.kill()
            self.fault = "the unauthenticated clients have failed"
        else:
            self.fault = found.fault()
            self.told = (
                f"{found.stood} connections to {found.listeners} listeners, "
                f"{found.refused} refused, {found.let_in} let in"
            )
        if self.fault and session.exitstatus in OTHERWISE_WELL:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says what they did."""
        if self.told:
            terminalreporter.section("clients")
            terminalreporter.line(self.told)
            if why := blind():
                terminalreporter.line(why)
        if self.fault:
            terminalreporter.line(f"FAILED {self.fault}")


OTHERWISE_WELL = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


@contextlib.contextmanager
def no_attack() -> Iterator[None]:
    """Unauthenticated clients spare this process, and those that it starts, meanwhile."""
    with socket.socket(socket.AF_UNIX) as sign:
        sign.bind(f"\0{NO_ATTACK}{os.getpid()}")
        yield


class Attack:
    """Who calls, round after round, what `pid` and its descendants listen at."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._calls: Counter[int] = Counter()  # by inode, of listeners of this run
        self._foreign: set[int] = set()  # inodes of others' listeners
        self._clients = UnauthenticatedClients()

    def round(self) -> None:
        """Comes to each once, and to one that is new in every manner at once."""
        theirs = self._theirs()
        for inode, address in theirs.items():
            times = 1 if self._calls[inode] else len(MANNERS)
            if self._calls[inode] < MOST:
                self._calls[inode] += times
                for _ in range(times):
                    self._clients.call(address)
        self._clients.go_on()

    @property
    def listeners(self) -> int:
        """How many it has come to."""
        return sum(calls > 0 for calls in self._calls.values())

    def end(self) -> Found:
        """Leaves, and says what came of it."""
        self._clients.go_on()
        self._clients.close()
        return Found(
            self.listeners,
            self._clients.stood,
            self._clients.refused,
            self._clients.let_in,
        )

    def _theirs(self) -> dict[int, Address]:
        """Where this run listens, but for who is to be spared."""
        tcp = {i: one.address for i, one in listeners().items() if one.backlog == BACKLOG}
        # After the others: who is to be spared says so before it listens.
        signs = {int(name.removeprefix(NO_ATTACK)) for name, _ in unix_sockets(NO_ATTACK).values()}
        quiet_ones = signs & with_descendants(self._pid) if signs else signs
        spared = inodes(pid for one in quiet_ones for pid in with_descendants(one))
        unix = {i: "\0" + name for i, (name, listens) in unix_sockets(UNIX).items() if listens}
        some: dict[int, Address] = {**tcp, **unix}
        if some.keys() - self._calls.keys() - self._foreign:
            self._foreign = some.keys() - inodes(with_descendants(self._pid))
        return {i: address for i, address in some.items() if i not in self._foreign | spared}


def with_descendants(pid: int) -> set[int]:
    """A process, and all that have come of it."""
    return {pid} | descendants(pid)


def main(pid: int) -> None:
    """Attacks until its input is closed."""
    os.nice(LOWEST)
    attack = Attack(pid)
    while not select.select([sys.stdin], [], [], ROUND_S)[0]:
        attack.round()
    print(json.dumps(attack.end().__dict__))


if __name__ == "__main__":
    main(int(sys.argv[1]))
