"""A rank that is killed while another rank's rank info is missing is named immediately."""

import subprocess
import sys

import pytest

from pycomm import _core

KEY = "0123456789abcdef"
RANK = """
import sys, time
from pycomm import _core, errors
from pycomm.testing.threads import join
port, rank = int(sys.argv[1]), int(sys.argv[2])
store = _core.TcpStore.connect("127.0.0.1", port, "0123456789abcdef", 30.0)
begin = time.monotonic()
try:
    join(store, rank, {"size": 4, "timeout_s": 40.0, "transport": "tcp",
                        "secret": "0123456789abcdef"})
except errors.Error as error:
    print(type(error).__name__, error.peer, time.monotonic() - begin < 30, error)
"""


@pytest.mark.parametrize(("lives", "dies"), [(0, 3), (3, 0), (3, 2)])
def test_rank_killed_before_all_join_is_named(lives: int, dies: int) -> None:
    """Rank 1 never starts: no rank completes the exchange of rank infos."""
    server = _core.TcpStore.serve("127.0.0.1", 0, KEY)
    ranks = {
        rank: subprocess.Popen(
            [sys.executable, "-c", RANK, str(server.port), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (lives, dies)
    }
    try:
        for rank in ranks:
            server.get(f"world/rank_info/{rank}", 60.0)
        ranks[dies].kill()
        output, _ = ranks[lives].communicate(timeout=60)
        assert output.startswith(f"PeerLost {dies} True"), output
        assert f"rank {dies} (host" in output
        assert f"pid {ranks[dies].pid}" in output
        assert "died while the group formed" in output
    finally:
        for process in ranks.values():
            process.kill()
            process.communicate()
