"""Threads that use the package at the same time. In a free-threaded Python they run in parallel,
and a missing lock crashes the process or fails an assertion."""

import gc
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from on_ranks import on_ranks

import pycomm
from pycomm import Group, _core, errors, kernels, reference
from pycomm.group import _groups, _living
from pycomm.testing import run_ranks

THREADS = 4


def together(*bodies: Callable[[], Any]) -> None:
    """Runs each body on a thread, all from the same moment; raises the first error."""
    start = threading.Barrier(len(bodies))
    failed: list[BaseException] = []

    def run(body: Callable[[], Any]) -> None:
        start.wait()
        try:
            body()
        except BaseException as error:  # of any kind: raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


class Counted(np.ndarray):
    """An array whose instances are counted."""

    living: ClassVar[set[int]] = set()

    def __del__(self) -> None:
        """Uncounts the array."""
        Counted.living.discard(id(self))


def counted(count: int) -> Any:
    """A counted array of ones."""
    made = np.ones(count, np.float32).view(Counted)
    Counted.living.add(id(made))
    return made


def start_from_threads(group: Group) -> int:
    """Threads start calls of one group; returns how many of their arrays the group still keeps."""

    def start() -> None:
        for _ in range(300):
            works = [pycomm.all_reduce(counted(64), group=group, async_op=True) for _ in range(3)]
            for work in works:
                assert (work.result() == 1).all()

    together(*[start] * THREADS)
    pycomm.all_reduce(np.ones(1), group=group, async_op=True).wait()  # drops what is complete
    gc.collect()
    return len(Counted.living)


def test_threads_start_calls_of_one_group() -> None:
    (kept,) = run_ranks(1, start_from_threads)
    assert kept == 0


def use_own_group(group: Group) -> float:
    """Calls of every kind, and a subgroup."""
    x = np.full(1000, group.rank + 1.0)
    work = pycomm.all_reduce(x.copy(), group=group, async_op=True)
    rows = pycomm.all_gather(x[:2], group=group)
    assert rows[:, 0].tolist() == [1.0, 2.0]
    part = group.split(0, -group.rank)
    assert part is not None
    assert part.rank == 1 - group.rank
    assert pycomm.all_reduce(np.ones(1), group=part)[0] == 2
    part.close()
    return float(work.result()[0])


def test_threads_use_groups_of_their_own() -> None:
    def runs() -> None:
        for _ in range(10):
            assert run_ranks(2, use_own_group) == [3.0, 3.0]

    together(*[runs] * THREADS)


def close_while_threads_call(group: Group) -> list[str]:
    """One thread closes a subgroup while others call and start calls; returns their errors."""
    names = []
    for _ in range(20):
        part = group.split(0)
        assert part is not None
        began = threading.Semaphore(0)
        ends: list[str] = []

        def calls(
            asynchronous: bool, part: Group = part, began: Any = began, ends: Any = ends
        ) -> None:
            began.release()
            x = np.ones(16, np.float32)
            while True:
                try:
                    made = pycomm.all_reduce(x, group=part, async_op=asynchronous)
                    if asynchronous:
                        made.wait()
                    part.stats()
                except errors.InvalidArgument:  # another thread is inside a call of this group
                    continue
                except errors.Error as error:  # the result
                    ends.append(type(error).__name__)
                    return

        def close(part: Group = part, began: Any = began) -> None:
            for _ in range(THREADS):
                began.acquire()
            part.close()

        together(close, *[lambda a=i % 2 == 0: calls(a) for i in range(THREADS)])
        names += ends
    return names


def test_group_closes_while_threads_call() -> None:
    (names,) = run_ranks(1, close_while_threads_call)
    assert names == ["GroupBroken"] * (20 * THREADS)


def test_threads_run_kernels() -> None:
    def selects(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            x = rng.standard_normal(70_001).astype(np.float32)
            indices, values = kernels.topk(x, 500)
            expected = reference.topk(x, 500)
            assert np.array_equal(indices, expected[0])
            assert np.array_equal(values, expected[1])

    together(*[lambda seed=i: selects(seed) for i in range(THREADS)])


@on_ranks(1)
def test_default_group_changes_while_threads_call(group: Group) -> None:
    others = [group.split(0) for _ in range(2)]
    ended = threading.Event()

    def change() -> None:
        try:
            for i in range(100_000):
                _core.set_default_group(None if i % 3 == 0 else others[i % 3 - 1].core)
        finally:
            _core.set_default_group(None)
            ended.set()

    def call() -> None:
        barrier = _core.Call("barrier")
        while not ended.is_set():
            try:
                barrier(None, None, None, None, False)
            # No group, which is GroupBroken where an earlier test has destroyed one, or another
            # thread is inside a call.
            except (errors.InvalidArgument, errors.GroupBroken):
                continue

    together(change, *[call] * 3)


@on_ranks(1)
def test_groups_are_aborted_while_threads_make_and_drop_others(group: Group) -> None:
    ended = threading.Event()

    def drop() -> None:
        try:
            for _ in range(100):
                assert group.split(0) is not None
        finally:
            ended.set()

    def look() -> None:
        while not ended.is_set():
            assert group in _living(_groups)

    together(drop, look, look)


FIRST = """
import sys, threading
import numpy as np
import pycomm
group = pycomm.init(rank=0, size=1)
parts = [group.split(0) for _ in range(8)]
start = threading.Barrier(len(parts))
wrong = []
def first(part):
    start.wait()
    x = np.ones(3)
    if pycomm.all_reduce(x, group=part)[0] != 1 or pycomm._core.inspect(x, True) is None:
        wrong.append(part)
threads = [threading.Thread(target=first, args=(part,)) for part in parts]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong
print(getattr(sys, "_is_gil_enabled", lambda: True)())
"""


def test_first_calls_of_several_threads_and_the_gil_stays_off() -> None:
    """In a new process: the core learns the types of arrays at the first calls."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(not sysconfig.get_config_var("Py_GIL_DISABLED"))]
