"""Memory of a group besides the caller's arrays, for any message size (docs/architecture.md), and
no growth over thousands of calls, groups and errors.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import pycomm
from benchmarks.support.leak_check import leaked, memory_mb, one_arena, resources
from pycomm import errors, testing

MOST = 16 << 20  # bytes of a rank, as documented
LARGE = 48 << 20


def resident(what: str) -> int:
    """Bytes of this process in memory, shared ones too: VmRSS now, VmHWM the maximum so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) << 10
    raise AssertionError(what)


def exchange(group: pycomm.Group, x: object, out: object) -> None:
    """Each rank sends to the next one. The messages arrive while the ranks send and then add, not
    while they wait for them."""
    following, previous = (group.rank + 1) % group.size, group.rank - 1
    received = pycomm.recv(out, previous % group.size, group=group, async_op=True)
    pycomm.barrier(group=group)
    pycomm.send(x, following, group=group)
    pycomm.all_reduce(np.ones(1), group=group)
    received.wait()


def added(group: pycomm.Group, dtype: str) -> dict[str, int]:
    """By verb: the most bytes that a group and its calls added since before its creation."""
    size, count = group.size, LARGE // np.dtype(dtype).itemsize
    whole = np.ones(count // size * size, dtype)
    rows = whole.reshape(size, -1)
    part, others = rows[group.rank].copy(), np.ones_like(whole).reshape(size, -1)
    verbs: dict[str, Callable[[pycomm.Group], object]] = {
        "all_reduce": lambda g: pycomm.all_reduce(whole, group=g),
        "broadcast": lambda g: pycomm.broadcast(whole, 0, group=g),
        "reduce": lambda g: pycomm.reduce(whole, 0, group=g),
        "all_gather": lambda g: pycomm.all_gather(part, others, group=g),
        "reduce_scatter": lambda g: pycomm.reduce_scatter(rows, out=part, group=g),
        "all_to_all": lambda g: pycomm.all_to_all(rows, others, group=g),
        "send": lambda g: exchange(g, rows, others),
    }
    found = {}
    for name, verb in verbs.items():
        pycomm.all_reduce(part[:1].copy(), group=group)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        own = group.split(0)
        assert own is not None
        whole.fill(1)
        verb(own)
        found[name] = resident("VmHWM") - before
        own.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "transport", "dtype"),
    [(2, "", "float32"), (3, "shm", "float32"), (3, "tcp", "float32"), (3, "tcp", "float16")],
)
def test_group_memory_does_not_depend_on_the_message(
    ranks: int, transport: str, dtype: str
) -> None:
    for by_verb in testing.run_ranks(ranks, added, dtype, transport=transport, processes=True):
        assert max(by_verb.values()) <= MOST, by_verb
        assert LARGE > 2 * MOST  # a copy of the message would exceed the limit


GROUPS, ROUNDS, RANKS = 60, 15, 3  # for each transport; calls of each verb in each group


def use_group(group: pycomm.Group, aborted: bool) -> None:
    """The life of a group: calls small and large, on shared arrays, in a subgroup, and mismatches;
    at the end it is closed or aborted."""
    for turn in range(ROUNDS):
        count = 10 ** (turn % 6)
        x = pycomm.empty(count, np.float32) if turn % 2 else np.ones(count, np.float32)
        x[...] = 1
        pycomm.all_reduce(x, group=group)
        pycomm.broadcast(x, group=group)
        pycomm.all_gather(x, np.empty((group.size, count), np.float32), group=group)
    part = group.split(group.rank % 2)
    assert part is not None
    pycomm.all_reduce(np.ones(100), group=part)
    part.close()
    with pytest.raises(errors.Mismatch):
        pycomm.all_reduce(np.ones(3 + group.rank), group=group)
    if aborted:
        with pytest.raises(errors.GroupBroken):
            group.abort("enough of it")
            pycomm.barrier(group=group)


def growth() -> dict[str, list[float]]:
    """Growth of this process: private megabytes and mappings between the first third of the groups
    and the end, when no other new resource is held."""
    one_arena()
    found: dict[str, list[float]] = {"MB": [], "mappings": []}
    before = resources()
    for number in range(GROUPS):
        for transport in ("local", "shm", "tcp"):
            testing.run_ranks(RANKS, use_group, number % 2 == 1, transport=transport)
        if number + 1 in (GROUPS // 3, GROUPS):
            assert leaked(before) == ""
            found["MB"].append(memory_mb())
            found["mappings"].append(len(Path("/proc/self/maps").read_text().splitlines()))
    return found


def test_nothing_grows_over_20_000_calls_in_180_groups() -> None:
    """A separate process: memory kept by other tests would hide growth, or look like it."""
    assert GROUPS * 3 * RANKS * (3 * ROUNDS + 2) > 20_000
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
        found = pool.submit(growth).result()
    print(found)
    early, late = zip(*found.values(), strict=True)
    more = dict(zip(found, (b - a for a, b in zip(early, late, strict=True)), strict=True))
    assert more["MB"] < 2
    assert more["mappings"] <= 2


def calls_of_all_kinds(group: pycomm.Group) -> tuple[set[str], float]:
    """The transports to other ranks, and the result of a large sum of ones."""
    shared = pycomm.empty(LARGE // 4, np.float32)
    for x in (np.ones(LARGE // 4, np.float32), shared):
        x[...] = 1
        pycomm.all_reduce(x, group=group)
    pycomm.barrier(group=group)
    return {member.transport for member in group.peer_info()} - {"self"}, float(shared.mean())


def run_in_a_full_shm() -> None:
    """Runs a program in a namespace whose /dev/shm is small and full."""
    Path("/dev/shm/all").write_bytes(bytes(shutil.disk_usage("/dev/shm").free))
    assert shutil.disk_usage("/dev/shm").total == SMALL
    assert testing.run_ranks(4, calls_of_all_kinds, transport="", processes=True) == (
        [({"shm"}, 4.0)] * 4
    )
    print("all is well")


SMALL = 64 << 20  # bytes of /dev/shm, the default of containers
MOUNT = f'mount -t tmpfs -o size={SMALL} tmpfs /dev/shm && exec "$@"'


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="needs root and unshare, for a private /dev/shm",
)
def test_a_small_and_full_dev_shm_is_no_limit() -> None:
    """Memory of groups is anonymous and uses no file system."""
    job = [sys.executable, "-c", "import test_memory; test_memory.run_in_a_full_shm()"]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", MOUNT, "sh", *job],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "all is well\n"), done.stderr
