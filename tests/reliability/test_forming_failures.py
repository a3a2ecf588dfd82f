"""Groups that do not form: a rank is killed, or it has too few descriptors. All ranks name it."""

import os
import resource
import subprocess
import sys

import numpy as np
import pytest

import pycomm
from pycomm import Group, _core, errors
from pycomm.testing import run_ranks

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


def form_with_few_descriptors(group: Group) -> tuple[str, int | None, str, float, float]:
    """Rank 1 has only some descriptors left while a subgroup forms, and then enough."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if group.rank == 1:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, before[1]))
    with pytest.raises(errors.Error) as caught:
        group.split(0)
    parent = pycomm.all_reduce(np.ones(3), group=group)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    again = group.split(0)
    assert again is not None
    total = pycomm.all_reduce(np.ones(3), group=again)
    error = caught.value
    return type(error).__name__, error.peer, str(error), float(parent[0]), float(total[0])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_rank_without_descriptors_is_named_by_all(transport: str) -> None:
    found = run_ranks(3, form_with_few_descriptors, transport=transport, processes=True)
    for kind, peer, text, *sums in found:
        assert (kind, peer) == ("Unsupported", 1), text
        assert "rank 1 (host" in text
        assert "raise the limit there (ulimit -n)" in text
        assert sums == [3.0, 3.0]
