"""The attack during the tests: it connects to every pycomm listener and to no other, in every way.
A run fails if a client was accepted, or if no listener was reached.
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attack
import pytest
from attack import BACKLOG, MANY, Attack, Result, no_attack, unrecognizable
from finished import finished
from paths import ROOT, SUPPORT, TESTS

from benchmarks.support.ports import free_port
from benchmarks.support.unauthenticated import ANSWER, MANNERS, UnauthenticatedClients
from pycomm import _core

LIMIT_S = 60.0
FORMS = "import pycomm; pycomm.init(secret='0123456789abcdef', timeout_s=120)"


@contextlib.contextmanager
def listener_that_sends(text: bytes) -> Iterator[tuple[tuple[str, int], threading.Semaphore]]:
    """A listener like pycomm's that sends this reply to each client that sent data; and a semaphore
    that is released for each connection."""
    callers: list[socket.socket] = []
    came = threading.Semaphore(0)

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                caller, _ = listener.accept()
                callers.append(caller)
                with contextlib.suppress(OSError):  # the client closed the connection, or is silent
                    caller.settimeout(0.05)
                    caller.sendall(text if caller.recv(1) else b"")
                came.release()

    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield listener.getsockname(), came
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for caller in callers:
                caller.close()


RECOGNIZABLE = pytest.mark.skipif(bool(unrecognizable()), reason=unrecognizable())
LETS_IN = pytest.mark.no_attack("it lets unauthenticated clients in, for which the run would fail")


@LETS_IN
@pytest.mark.parametrize(("more", "let_in"), [(0, False), (1, True)])
def test_client_that_passes_the_handshake_is_counted_as_accepted(more: int, let_in: bool) -> None:
    with listener_that_sends(b"x" * (ANSWER + more)) as (address, came):
        attack = UnauthenticatedClients()
        for _ in MANNERS:
            attack.call(address)
        for _ in MANNERS:
            assert came.acquire(timeout=LIMIT_S)
        attack.go_on()
        attack.close()
    assert attack.connected == len(MANNERS)
    assert attack.refused == 0
    assert (attack.let_in > 0) == let_in


@RECOGNIZABLE
def test_attack_connects_to_each_pycomm_listener_and_no_other() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(free_port())
    store = _core.TcpStore.serve("127.0.0.1", 0, 16 * "k")
    attack = Attack(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        rank = subprocess.Popen([sys.executable, "-c", FORMS], env={**os.environ, **environment})
        try:
            end = time.monotonic() + LIMIT_S
            while attack.listeners < 6 and time.monotonic() < end:
                attack.round()
            for _ in MANNERS:
                attack.round()
            assert rank.poll() is None, "the unauthenticated clients ended a rank that forms"
        finally:
            rank.kill()
            rank.wait()
        foreign.setblocking(False)
        with pytest.raises(BlockingIOError):  # no connection
            foreign.accept()
    found = attack.end()
    assert found.listeners == 6, "two stores, of two ports each, and a rank's TCP and Unix sockets"
    assert found.connected >= 12 * len(MANNERS)
    assert found.let_in == 0
    del store


@RECOGNIZABLE
def test_attack_skips_processes_with_no_attack() -> None:
    store = _core.TcpStore.serve("127.0.0.1", 0, 16 * "k")
    attack = Attack(os.getpid())
    with no_attack():
        attack.round()
    assert attack.listeners == 0
    attack.round()
    found = attack.end()
    assert (found.listeners, found.connected) == (2, 2 * len(MANNERS)), (
        "new listeners: every way at once"
    )
    del store


@pytest.mark.parametrize(("most", "message"), [(BACKLOG, ""), (BACKLOG - 1, "not 4092: no TCP")])
def test_indistinguishable_listeners_are_reported(
    most: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "somaxconn").write_text(f"{most}\n")
    monkeypatch.setattr(attack, "SOMAXCONN", tmp_path / "somaxconn")
    assert (message in unrecognizable()) if message else unrecognizable() == ""


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (Result(MANY, 1, 499, 0), ""),
        (Result(MANY - 1, 0, 490, 0), ""),  # too few to be sure
        (Result(MANY, 0, 500, 0), f"unauthenticated clients reached none of {MANY} listeners"),
        (Result(1, 10, 0, 2), "2 unauthenticated clients were let in"),
    ],
)
def test_faults_of_an_attack_are_described(found: Result, fault: str) -> None:
    assert found.fault() == fault


# A run of one test, which waits until all clients connected.
PLANTED = """
    from test_attack import ANSWER, LIMIT_S, MANNERS, listener_that_sends

    def test_planted():
        with listener_that_sends(b"x" * (ANSWER + MORE)) as (_, came):
            for _ in MANNERS:
                assert came.acquire(timeout=LIMIT_S)
"""


@LETS_IN
@RECOGNIZABLE
@pytest.mark.parametrize("let_in", [False, True])
def test_run_reports_the_attack_and_fails_when_it_should(tmp_path: Path, let_in: bool) -> None:
    text = textwrap.dedent(PLANTED).replace("MORE", str(int(let_in)))
    (tmp_path / "test_planted.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    ways = os.pathsep.join(map(str, (TESTS, SUPPORT, ROOT, Path(__file__).parent)))
    done = finished(
        [*command, "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": ways},
    )
    assert "1 passed" in done.stdout, done.stdout
    counts = re.search(r"(\d+) connections to 1 listeners, \d+ refused, (\d+) let in", done.stdout)
    assert counts, done.stdout
    assert int(counts[1]) >= len(MANNERS)
    assert (int(counts[2]) > 0, done.returncode) == (let_in, int(let_in)), done.stdout
    assert ("unauthenticated clients were let in" in done.stdout) == let_in
