"""Ranks on different hosts, for real: two network namespaces joined by a virtual cable.

A namespace has its own interfaces and its own abstract sockets, so two of them on one machine are
two hosts to pycomm. Needs root and iproute2.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="needs root and iproute2 to make network namespaces",
)

PROGRAM = """
import json, sys
import numpy as np
import pycomm

group = pycomm.init(timeout_s=30)
rng = np.random.default_rng(group.rank)
x = rng.standard_normal(300_000).astype(np.float32)
pycomm.all_reduce(x)
y = np.full(5, group.rank)
pycomm.broadcast(y, src=3)
print(json.dumps({
    "transports": [member.transport for member in group.members],
    "local_rank": pycomm.local_rank(), "local_size": pycomm.local_size(),
    "hosts": pycomm.host_count(), "sum": x.tobytes().hex()[:64], "y": y.tolist(),
}))
pycomm.shutdown()
"""


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of two namespaces, 10.99.0.1 and 10.99.0.2, that see each other and nothing else."""
    tag = f"{os.getpid() % 10000}"
    names = [f"pyc{tag}a", f"pyc{tag}b"]
    ends = [f"v{tag}a", f"v{tag}b"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for i, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.99.0.{i}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def start(host: str, rank: int, secret: str) -> subprocess.Popen[str]:
    """Rank `rank` of 4 in a namespace; rank 0's, the first, serves the rendezvous."""
    variables = {
        "PYCOMM_RANK": str(rank),
        "PYCOMM_SIZE": "4",
        "PYCOMM_SECRET": secret,
        "MASTER_ADDR": "10.99.0.1",
        "MASTER_PORT": "29511",
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-c", PROGRAM],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_shm_inside_a_host_and_tcp_between(hosts: list[str]) -> None:
    secret = secrets.token_hex(32)
    ranks = [start(hosts[rank // 2], rank, secret) for rank in range(4)]
    told = []
    for rank in ranks:
        out, err = rank.communicate(timeout=60)
        assert rank.returncode == 0, err
        told.append(json.loads(out))
    assert [t["transports"] for t in told] == [
        ["self", "shm", "tcp", "tcp"],
        ["shm", "self", "tcp", "tcp"],
        ["tcp", "tcp", "self", "shm"],
        ["tcp", "tcp", "shm", "self"],
    ]
    assert [t["local_rank"] for t in told] == [0, 1, 0, 1]
    assert {(t["local_size"], t["hosts"]) for t in told} == {(2, 2)}
    assert len({t["sum"] for t in told}) == 1  # the same bits
    assert all(t["y"] == [3] * 5 for t in told)
