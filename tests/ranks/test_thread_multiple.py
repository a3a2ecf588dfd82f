"""Several threads on one group, with thread_multiple=True. tests/native/threads_test.cpp has the
orders of events that need the core."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks

import pycomm
from pycomm import Group, errors
from pycomm.errors import GroupBroken, Mismatch, PeerLost, Timeout
from pycomm.testing import run_ranks

TRANSPORTS = ["local", "shm", "tcp"]
SIZES = [2, 4]
LIMIT_S = 20.0
SMALL, LARGE = 10, 300_000  # less than a frame, and more than a ring holds

pytestmark = pytest.mark.timeout(120)
by_transport = pytest.mark.parametrize("transport", TRANSPORTS)
by_size = pytest.mark.parametrize("size", SIZES)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of the calls, each on a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [made.result() for made in [pool.submit(call) for call in calls]]


def outcome(call: Callable[[], Any]) -> Any:
    """The result of the call, or its error."""
    try:
        return call()
    except errors.Error as error:  # compared by the test
        return error


def on(size: int, transport: str, program: Callable[[Group], Any], **options: Any) -> list[Any]:
    return run_ranks(
        size, program, transport=transport, thread_multiple=True, timeout_s=LIMIT_S, **options
    )


def sums(group: Group, n: int) -> float:
    x = np.ones(n)
    pycomm.all_reduce(x, group=group)
    assert (x == x[0]).all()
    return float(x[0])


def in_two_orders(group: Group, counts: tuple[int, int]) -> list[Any]:
    """Two threads call; the one of value 1 first on rank 0, and last on the others. In the order of
    the values."""
    called = threading.Event()

    def call(value: float, n: int) -> Any:
        first = (value == 1) == (group.rank == 0)
        assert first or called.wait(LIMIT_S)
        x = np.full(n, value)
        work = pycomm.all_reduce(x, group=group, async_op=True)
        called.set()

        def end() -> float:
            work.wait()
            return float(x[0])

        return outcome(end)

    return together(*[lambda v=v, n=n: call(v, n) for v, n in zip((1.0, 2.0), counts, strict=True)])


@by_size
@by_transport
def test_different_calls_in_another_order_are_a_mismatch(size: int, transport: str) -> None:
    def program(group: Group) -> None:
        ends = in_two_orders(group, (SMALL, 2 * SMALL))
        mismatches = [one for one in ends if isinstance(one, Mismatch)]
        assert mismatches, ends
        assert f"count {SMALL}," in str(mismatches[0])
        assert f"count {2 * SMALL}," in str(mismatches[0])

    on(size, transport, program)


@by_size
@by_transport
def test_equal_calls_in_another_order_are_paired_by_number(size: int, transport: str) -> None:
    """As on gloo: the first calls of all ranks, whatever their threads mean by them."""
    others = size - 1

    def program(group: Group) -> list[Any]:
        return in_two_orders(group, (SMALL, SMALL))

    first, second = 1 + 2.0 * others, 2 + 1.0 * others
    assert on(size, transport, program) == [[first, second]] + [[second, first]] * others


@by_transport
def test_the_error_names_the_thread_and_the_call_that_are_inside(transport: str) -> None:
    over = threading.Event()

    def program(group: Group) -> None:
        if group.rank == 1:
            assert over.wait(LIMIT_S)
            return

        def first() -> int:
            with pytest.raises(GroupBroken):
                sums(group, LARGE)
            return threading.get_ident()

        def second() -> str:
            end = time.monotonic() + LIMIT_S
            while f"inside call 1, all_reduce(float64, count {LARGE}" not in current_call(group):
                assert time.monotonic() < end
            with pytest.raises(Timeout) as late:
                pycomm.barrier(group=group, timeout_s=0.5)
            return str(late.value)

        thread, text = together(first, second)
        assert f"thread {thread} is inside" in text
        assert f"all_reduce(float64, count {LARGE}" in text
        over.set()

    on(2, transport, program)


def current_call(group: Group) -> str:
    return str(group.core.status()["current_call"])


def dies(group: Group) -> list[str]:
    if group.rank == 1:
        pycomm.recv(np.empty(1), 0, tag=9, group=group)  # rank 0 has formed the group
        os.kill(os.getpid(), signal.SIGKILL)
    pycomm.send(np.ones(1), 1, tag=9, group=group)
    seen = together(
        lambda: outcome(lambda: pycomm.all_reduce(np.ones(SMALL), group=group)),
        lambda: outcome(lambda: pycomm.barrier(group=group)),
        lambda: outcome(lambda: pycomm.recv(np.empty(1), 1, group=group)),
    )
    assert all("rank 1" in str(one) for one in seen), seen
    return sorted(type(one).__name__ for one in seen)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_dies_while_threads_wait(transport: str) -> None:
    first, second = on(2, transport, dies, processes=True, return_exceptions=True)
    assert isinstance(second, PeerLost)
    assert set(first) <= {"PeerLost", "GroupBroken"}
    assert "PeerLost" in first


INTERRUPTED = """
    import os, signal, threading
    import numpy as np, pycomm
    from pycomm import errors

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job

    def program(group):
        if group.rank == 1:
            over.wait(20)
            return
        first = pycomm.{FIRST}(np.ones(10), {TO}group=group, async_op=True)
        waits.set()
        try:
            first.wait()
        except errors.Error:  # the group was aborted
            over.set()

    waits, over = threading.Event(), threading.Event()
    store = pycomm._core.LocalStore()
    from pycomm.testing.threads import join
    options = dict(size=2, timeout_s=20.0, transport="local", secret="s" * 16, thread_multiple=True)
    groups = []
    def rank(i):
        group = join(store, i, options)
        groups.append(group)
        program(group)
    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for one in threads:
        one.start()
    waits.wait(20)
    group = next(g for g in groups if g.rank == 0)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        {CALL}
    except KeyboardInterrupt:  # as expected
        print("interrupted")
    group.abort("enough")
    over.set()
    for one in threads:
        one.join()
"""


@pytest.mark.parametrize(
    "call", ["pycomm.barrier(group=group)", "pycomm.recv(np.ones(1), 1, tag=3, group=group)"]
)
def test_ctrl_c_ends_the_wait_of_the_main_thread(call: str) -> None:
    code = textwrap.dedent(INTERRUPTED).replace("{CALL}", call)
    code = code.replace("{FIRST}", "all_reduce").replace("{TO}", "")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "interrupted\n", done.stderr


@on_ranks(2, thread_multiple=True)
def test_subgroups_have_the_option(group: Group) -> None:
    part = group.split(0)
    assert part is not None
    together(*[lambda: sums(part, SMALL) for _ in range(3)])


def test_init_rejects_the_option_if_the_group_exists_without_it() -> None:
    code = """
        import pycomm
        pycomm.init()
        try:
            pycomm.init(thread_multiple=True)
        except pycomm.errors.InvalidArgument as error:  # compared by the test
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "thread_multiple=True where it is made" in done.stdout, done.stderr
