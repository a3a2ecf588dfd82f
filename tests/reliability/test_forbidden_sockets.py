"""Behaviour of a rank whose system forbids connections that it needs.

Security modules forbid Unix sockets between containers that share a network, and firewalls allow
connections in one direction only. A library simulates both: it is loaded into every rank and
rejects the connections that the rank's variable REFUSED lists.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from finished import finished_together
from paths import ROOT
from sample import of_the_day

from benchmarks.support.ports import free_port

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.timeout(200),
]
SHIM = """
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
int connect(int fd, const struct sockaddr* to, socklen_t length) {
  const char* refused = getenv("REFUSED");
  if (refused && strcmp(refused, "unix") == 0 && to->sa_family == AF_UNIX &&
      memcmp(((const struct sockaddr_un*)to)->sun_path + 1, "pycomm-", 7) == 0) {
    errno = EACCES;
    return -1;
  }
  if (refused && strcmp(refused, "tcp") == 0 &&
      (to->sa_family == AF_INET6 ||
       (to->sa_family == AF_INET &&
        ntohs(((const struct sockaddr_in*)to)->sin_port) != atoi(getenv("MASTER_PORT"))))) {
    errno = ECONNREFUSED;
    return -1;
  }
  int (*next)(int, const struct sockaddr*, socklen_t) =
      (int (*)(int, const struct sockaddr*, socklen_t))dlsym(RTLD_NEXT, "connect");
  return next(fd, to, length);
}
"""
RANKS = """
import json, os, sys, time
rank, (who, what, backend) = int(os.environ["RANK"]), sys.argv[1:]
if who in ("all", str(rank)):
    os.environ["REFUSED"] = what
import numpy as np
import pycomm
begin = time.monotonic()
if backend == "torch":
    import torch, torch.distributed as dist
    dist.init_process_group("pycomm")
    x = torch.ones(1000)
    dist.all_reduce(x)
    group = pycomm.init()
    sums = [x[0].item()]
else:
    try:
        group = pycomm.init(transport=backend if backend in ("shm", "tcp") else None)
    except pycomm.errors.PeerLost as error:  # the result: the caller asserts it
        print(json.dumps(str(error)), flush=True)
        sys.exit()
    sums = [pycomm.all_reduce(np.ones(1000, np.float32))[0].item()]
part = group.split(rank % 2)
sums.append(pycomm.all_reduce(np.ones(10), group=part)[0].item())
both = [sorted({m.transport for m in g.peer_info()} - {"self"}) for g in (group, part)]
print(json.dumps([sums, *both]), flush=True)
"""


def _run(folder: Path, *arguments: str) -> tuple[list[object], str]:
    """The stdout of four ranks, and their stderr."""
    shim = folder / "shim.so"
    (folder / "shim.c").write_text(SHIM)
    command = ["cc", "-shared", "-fPIC", "-o", str(shim), str(folder / "shim.c"), "-ldl"]
    subprocess.run(command, check=True)
    script = folder / "ranks.py"
    script.write_text(RANKS)
    env = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "PYTHONPATH": str(ROOT),
        "PYCOMM_SECRET": secrets.token_hex(32),
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, str(script), *arguments]
    ranks = finished_together((command, {**env, "RANK": str(r)}) for r in range(4))
    errors = "".join(rank.stderr for rank in ranks)
    return [json.loads(rank.stdout) for rank in ranks if rank.stdout], errors


@pytest.mark.parametrize("backend", ["pycomm", "torch"])
@pytest.mark.parametrize("rank", of_the_day(["1", "3", "all"], 3))
def test_all_ranks_use_tcp_and_are_warned(tmp_path: Path, rank: str, backend: str) -> None:
    results, errors = _run(tmp_path, rank, "unix", backend)
    assert results == [[[4.0, 2.0], ["tcp"], ["tcp"]]] * 4, errors
    assert errors.count("ranks of this host use TCP") == 1, errors


def test_ranks_that_may_connect_share_memory(tmp_path: Path) -> None:
    # The others connect to rank 0, which connects to no rank.
    results, errors = _run(tmp_path, "0", "unix", "pycomm")
    assert results == [[[4.0, 2.0], ["shm"], ["shm"]]] * 4, errors
    assert "TCP" not in errors


def test_explicit_transport_is_kept(tmp_path: Path) -> None:
    results, errors = _run(tmp_path, "all", "unix", "shm")
    assert len(results) == 4, (results, errors)
    assert any("PYCOMM_TRANSPORT=tcp" in str(text) for text in results), results


@pytest.mark.parametrize(("what", "transport"), [("tcp", "tcp"), ("unix", "shm")])
@pytest.mark.parametrize("rank", ["1", "2"])
def test_peer_connects_to_a_rank_that_cannot_connect(
    tmp_path: Path, rank: str, what: str, transport: str
) -> None:
    results, errors = _run(tmp_path, rank, what, transport)
    assert results == [[[4.0, 2.0], [transport], [transport]]] * 4, errors
