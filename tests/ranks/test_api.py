"""The calls of the package, with ranks as threads over every transport, and as processes."""

import hashlib
import json
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from finished import finished
from on_ranks import on_ranks

import pycomm
from pycomm import Group, errors
from pycomm.testing import run_ranks
from pycomm.testing.threads import join

TRANSPORTS = ["local", "shm", "tcp"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_keep_their_order_and_tags(transport: str) -> None:
    def one_way(group: Group) -> Any:
        if group.rank == 0:
            for i in range(4):
                pycomm.send(np.full(1000, i), 1, tag=i)
            return None
        return [int(pycomm.recv(np.zeros(1000, int), 0, tag=i)[0]) for i in range(4)]

    def there_and_back(group: Group) -> float:
        x = np.full(100_000, 1.0 + group.rank)
        if group.rank == 0:
            pycomm.send(x[::2], 1)
            return float(pycomm.recv(x, 1).sum())
        pycomm.recv(x[::2], 0)
        pycomm.send(x, 0)
        return float(x.sum())

    assert run_ranks(2, one_way, transport=transport)[1] == [0, 1, 2, 3]
    assert run_ranks(2, there_and_back, transport=transport) == [150_000.0] * 2


def same_bits(group: Group, algorithm: str | None = None) -> list[str]:
    """Hashes of sums whose bits depend on the order of summation."""
    rng = np.random.default_rng(group.rank)
    hashes = []
    for count in (1, 7, 4096, 70_001):
        for dtype in (np.float32, np.float16):
            x = rng.standard_normal(count).astype(dtype)
            pycomm.all_reduce(x, group=group, algorithm=algorithm)
            hashes.append(hashlib.sha256(x.tobytes()).hexdigest())
    return hashes


def test_same_bits_on_every_rank_run_and_transport() -> None:
    ring = run_ranks(3, same_bits, "ring")[0]
    for transport in TRANSPORTS:
        assert run_ranks(3, same_bits, "ring", transport=transport) == [ring] * 3
    assert run_ranks(3, same_bits, "ring", transport="", processes=True) == [ring] * 3
    shared = run_ranks(3, same_bits)[0]  # the default where memory is shared
    assert run_ranks(3, same_bits, "shared_memory", transport="shm") == [shared] * 3
    assert run_ranks(3, same_bits, transport="", processes=True) == [shared] * 3


@on_ranks(2)
def test_async_calls_end_in_order_and_keep_their_arrays(group: Group) -> None:
    works = [
        pycomm.all_reduce(np.full(1000 * i, float(i)), group=group, async_op=True)
        for i in range(20)
    ]
    last = works[-1].result()
    assert all(work.done() for work in works)
    assert pycomm.all_reduce(np.ones(3), group=group).tolist() == [2.0] * 3
    work = pycomm.barrier(async_op=True)
    work.wait(5.0)
    work.wait()
    assert work.result() is None
    for i in range(20):  # no reference to the works: the arrays live until the calls end
        pycomm.all_reduce(np.full(100_000, float(i)), group=group, async_op=True)
    pycomm.barrier()
    assert (last == 38.0).all()
    assert all((work.result() == 2.0 * i).all() for i, work in enumerate(works))


def test_wait_times_out_and_the_call_continues() -> None:
    ready = threading.Event()

    def fn(group: Group) -> Any:
        if group.rank == 1:
            ready.wait()
            return pycomm.all_reduce(np.ones(2), group=group)
        work = pycomm.all_reduce(np.ones(2), group=group, async_op=True)
        assert not work.done()
        with pytest.raises(errors.Timeout):
            work.wait(0.05)
        ready.set()
        return work.result()

    assert [x.tolist() for x in run_ranks(2, fn)] == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_split(transport: str) -> None:
    def fn(group: Group) -> Any:
        half = group.split(group.rank % 2, key=-group.rank)
        everyone = group.split(0)
        excluded = group.split(None if group.rank == 0 else 1)
        assert (excluded is None) == (group.rank == 0)
        x = pycomm.all_reduce(np.array([10**group.rank]), group=half)
        y = pycomm.all_reduce(np.array([10**group.rank]), group=everyone)
        return half.rank, half.ranks, int(x[0]), int(y[0]), half.name

    results = run_ranks(4, fn, transport=transport)
    assert [r[0] for r in results] == [1, 1, 0, 0]
    assert [r[1] for r in results] == [[2, 0], [3, 1]] * 2
    assert [r[2] for r in results] == [101, 1010] * 2
    assert {r[3] for r in results} == {1111}
    assert results[0][4] == results[2][4] != results[1][4]


@on_ranks("n")
@pytest.mark.parametrize("n", [2, 3, 4])
def test_ring_sends_the_expected_bytes(group: Group, n: int) -> None:
    """A ring sends each of its 2 (n - 1) chunks of 1/n once, plus headers."""
    before = group.stats()
    pycomm.all_reduce(np.ones(n * 10_240, np.float32), algorithm="ring", group=group)
    after = group.stats()
    assert after.calls == before.calls + 1
    assert after.seconds > before.seconds
    assert json.loads(json.dumps(after)) == after
    with pytest.raises(AttributeError, match="no 'call', but calls, frames_sent"):
        _ = after.call
    assert f"pid={os.getpid()}, transport='local'" in repr(group.peer_info())
    assert after.bytes == after.bytes_written > after.bytes_sent
    payload = after.bytes_sent - before.bytes_sent
    headers = after.bytes_written - before.bytes_written - payload
    assert headers == 32 * (after.frames_sent - before.frames_sent)
    assert after.bytes_received - before.bytes_received > payload
    assert payload == 2 * (n - 1) * 10_240 * 4


def counts() -> tuple[int, int, float]:
    """Open descriptors, threads and resident memory (MiB) of this process."""
    with open("/proc/self/status") as lines:
        status = dict(line.split(":", 1) for line in lines)
    resident = int(status["VmRSS"].split()[0]) / 1024
    return len(os.listdir("/proc/self/fd")), int(status["Threads"]), resident


def test_groups_leak_nothing() -> None:
    def fn(group: Group) -> Any:
        group.split(0)
        pycomm.barrier()

    run_ranks(3, fn, transport="shm")
    before = counts()
    for transport in TRANSPORTS * 3:
        run_ranks(3, fn, transport=transport)
    # A closed TCP connection is kept for at most 2 s, until the peer has all data, and the kernel
    # counts a thread a moment longer than join() does.
    limit = time.monotonic() + 10
    while any(np.greater(counts()[:2], before[:2])) and time.monotonic() < limit:
        os.sched_yield()
    fds, threads, _ = counts()
    assert fds <= before[0]
    assert threads <= before[1]


@pytest.mark.parametrize("transport", ["local", "shm"])
def test_closed_group_has_no_open_connections(transport: str) -> None:
    kept: list[Group] = []
    before = counts()[0]
    run_ranks(8, kept.append, transport=transport)
    assert len(kept) == 8
    assert counts()[0] - before <= 2 * 8  # 7 connections each while they were open


ALONE = """
import atexit, numpy as np, pycomm
from pycomm import errors
for call in (pycomm.rank, lambda: pycomm.all_reduce(np.ones(1))):
    try:
        call()
        raise SystemExit("no error before init")
    except errors.InvalidArgument as error:
        assert "pycomm.init()" in str(error)
assert not pycomm.is_initialized()
group = pycomm.init()
assert pycomm.init(timeout_s=5) is group and pycomm.is_initialized()
assert (pycomm.rank(), pycomm.size(), pycomm.local_rank(), pycomm.local_size()) == (0, 1, 0, 1)
assert pycomm.host_count() == 1
assert pycomm.all_reduce(np.arange(3.0)).tolist() == [0, 1, 2]
assert pycomm.all_gather(np.arange(3)).tolist() == [[0, 1, 2]]
pycomm.shutdown()
pycomm.shutdown()
for call in (pycomm.rank, lambda: group.split(0)):
    try:
        call()
        raise SystemExit("no error after shutdown")
    except errors.GroupBroken:  # as it must
        pass
again = pycomm.init()
assert again is not group
pycomm.barrier()
print("fine")
"""


def run_python(code: str, **environment: str) -> Any:
    return finished([sys.executable, "-c", code], env={**os.environ, **environment}, timeout=180)


COMPILED = """
import gc, weakref
import numpy as np, pycomm
from pycomm import _core, errors
from pycomm._core_api import calls
from pycomm.default_group import as_thread_default
left = []
def fallback(group, call, source, output, result, async_op):
    left.append(call.operation)
    return calls.run(group, call, source, output, result, async_op)
_core.set_call_fallback(fallback)
x = np.ones(3, np.float32)
try: pycomm.all_reduce(x)
except errors.InvalidArgument: left.clear()  # there is no group yet
group = pycomm.init()
assert pycomm.all_reduce(x) is x and pycomm.broadcast(x, group=group) is x
assert pycomm.all_reduce(x, async_op=True).result() is x and left == []
assert pycomm.all_reduce(x[::2]) is not None and left == ["all_reduce"]
assert pycomm.all_reduce(x[::2], async_op=True).result() is not None and left == ["all_reduce"] * 2
for call in (lambda: _core.Call("barrier")(group), lambda: _core.Call("barrier")(group=group)):
    try: call()
    except TypeError as error: print(error)  # compared below
with as_thread_default(group): pycomm.barrier()
assert left[2:] == ["barrier"]
class Held(np.ndarray):
    pass
held = x.view(Held)
held.work = pycomm.all_reduce(held, async_op=True)
held.work.wait()
gone = weakref.ref(held)
del held
pycomm.all_reduce(x, async_op=True).wait()  # the group keeps the arrays of the last call
assert gc.collect() and gone() is None
try: pycomm.Work()
except TypeError: pycomm.shutdown()  # only the core makes one
try: pycomm.all_reduce(x)
except errors.GroupBroken as error: print(error)
"""


def test_only_calls_that_need_python_leave_the_core() -> None:
    done = run_python(COMPILED)
    error = "expected a group, an input, an output, a result and async_op\n"
    closed = "the default group was closed by pycomm.shutdown(); pycomm.init() makes a new one\n"
    assert (done.stdout, done.stderr, done.returncode) == (2 * error + closed, "", 0)


def test_single_process_from_init_to_exit() -> None:
    done = run_python(ALONE)
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)


def test_missing_secret_and_torch_init_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from pycomm import config
    from pycomm._bootstrap import rendezvous

    monkeypatch.setattr(rendezvous.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    place = config.Config(rank=0, size=2, master_host="127.0.0.1", master_port=1)
    with pytest.raises(errors.InvalidArgument, match=r"secrets\.token_hex"):
        rendezvous.find_store(place, 1.0)
    with pytest.raises(errors.InvalidArgument, match="MASTER_ADDR"):
        rendezvous.find_store(config.Config(rank=0, size=2), 1.0)


def test_log_lists_the_ranks() -> None:
    done = run_python("import pycomm; pycomm.init()", PYCOMM_LOG="info")
    assert done.returncode == 0
    pattern = (
        r'pycomm: group "world": 1 ranks on 1 hosts; rank 0 is local rank 0 of 1 on [^\s,]+; '
        "algorithm by size\n"
    )
    assert re.fullmatch(pattern, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        (["info"], 0, ["transports", "PYCOMM_SECRET", "bfloat16", "local"]),
        ([], 2, ["usage"]),
        (["dance"], 2, ["usage"]),
        (["info", "extra"], 2, ["extra"]),
        (["bench", "nothing"], 2, ["collectives"]),
    ],
)
def test_command_line(arguments: list[str], code: int, texts: list[str]) -> None:
    done = finished([sys.executable, "-m", "pycomm", *arguments], timeout=180)
    assert done.returncode == code
    assert all(word in done.stdout + done.stderr for word in texts)


def test_a_store_can_be_written_in_python() -> None:
    class Slow:
        def __init__(self) -> None:
            self.values, self.changed = {}, threading.Condition()

        def set(self, key: str, value: bytes, timeout_s: float = 30.0) -> None:
            with self.changed:
                self.values[key] = value
                self.changed.notify_all()

        def get(self, key: str, timeout_s: float) -> bytes:
            with self.changed:
                if not self.changed.wait_for(lambda: key in self.values, timeout_s):
                    raise errors.Timeout(key)
                return self.values[key]

        def add(self, key: str, amount: int, timeout_s: float = 30.0) -> int:
            with self.changed:
                self.values[key] = b"%d" % (int(self.values.get(key, b"0")) + amount)
                return int(self.values[key])

        def remove(self, key: str, timeout_s: float = 30.0) -> bytes | None:
            with self.changed:
                return self.values.pop(key, None)

        def claim(self, key: str, value: bytes, timeout_s: float = 30.0) -> bytes:
            with self.changed:
                return self.values.setdefault(key, value)

    store = Slow()

    def one(rank: int) -> list[float]:
        options = {"size": 2, "timeout_s": 20.0, "transport": "local"}
        group = join(store, rank, options)
        return pycomm.all_reduce(np.ones(2), group=group).tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [[2.0, 2.0]] * 2
    del Slow.claim  # only a rank that ends the forming of a group calls it
    with pytest.raises(errors.InvalidArgument, match=r"it has no method claim\(\)"):
        one(0)
