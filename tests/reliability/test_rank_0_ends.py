"""Rank 0 serves the store of user_get: it ends after the ranks that may use it, within a limit.

Plain processes without a launcher, with pycomm's store (a secret) and with torch's (none).
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.support.ports import free_port

LIMIT_S = 120
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("PYCOMM")}
# Rank 0 ends at once. Rank 1 reads a value when the test says so, or if rank 0 has ended.
PROGRAM = """
import atexit, os, select, sys
import pycomm
from pycomm import errors

pycomm.group.SERVE_S = float(sys.argv[1])
group = pycomm.init(timeout_s=60.0)
pids = pycomm.all_gather_object(os.getpid())
if group.rank == 0:
    pycomm.user_set("value", 7)
    print("closing", flush=True)
else:
    first = os.pidfd_open(pids[0])  # before the line: then the test lets rank 0 end
    print("formed", flush=True)
    select.select([first], [], [], float(sys.argv[2]))
    try:
        print("value", pycomm.user_get("value", 20.0), flush=True)
    except errors.PeerLost as error:  # printed for the test
        print("lost", error, flush=True)
"""

Ranks = list[subprocess.Popen[str]]


@contextlib.contextmanager
def started(secret: str, serve_s: float, wait_s: float) -> Iterator[Ranks]:
    """Two ranks, once rank 0 is about to end and rank 1 waits for that."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"PYCOMM_SECRET": secret} if secret else {}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(serve_s), str(wait_s)],
            env={**CLEAN, **env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, word in zip(ranks, ("closing\n", "formed\n"), strict=True):
            assert rank.stdout is not None
            assert rank.stdout.readline() == word
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=60)


SECRETS = pytest.mark.parametrize(
    "secret", ["0123456789abcdef" * 2, ""], ids=["pycomm's store", "torch's store"]
)
pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@SECRETS
def test_value_can_be_read_while_rank_0_ends(secret: str) -> None:
    """Rank 1 reads after 1 s, in which a rank 0 that did not wait would have ended."""
    with started(secret, 600, 1) as ranks:
        text, _ = ranks[1].communicate(timeout=LIMIT_S)
        assert text == "value 7\n"
        assert ranks[0].wait(LIMIT_S) == 0


@SECRETS
def test_rank_0_does_not_wait_for_a_dead_rank(secret: str) -> None:
    with started(secret, 600, 600) as ranks:
        ranks[1].kill()
        assert ranks[0].wait(LIMIT_S) == 0


@SECRETS
def test_rank_0_waits_within_a_limit(secret: str) -> None:
    """Rank 1 is stopped, and afterwards finds that rank 0 has ended."""
    with started(secret, 0.5, 600) as ranks:
        ranks[1].send_signal(signal.SIGSTOP)
        assert ranks[0].wait(LIMIT_S) == 0
        ranks[1].send_signal(signal.SIGCONT)
        text, _ = ranks[1].communicate(timeout=LIMIT_S)
        assert text.startswith("lost ")
        assert "rank 0" in text
