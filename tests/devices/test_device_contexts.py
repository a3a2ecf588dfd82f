"""The devices on which a rank creates a CUDA context: hundreds of megabytes each.

Ranks are processes with an emulated device each (tests/support/group_devices.py). The emulated
runtime creates contexts as CUDA does since version 12: every call does that needs one, on the
thread's current device, and cudaSetDevice itself.
"""

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

# pytest finds the fixture by name, so that it looks unused.
from group_devices import EMULATED, machine_fixture, numbers, on  # noqa: F401 - fixture

import pycomm

pytestmark = pytest.mark.timeout(300)


def uses_its_device(group: pycomm.Group, device: Any) -> list[int]:
    """All kinds of calls, on this thread, the worker and the watchdog: devices with contexts."""
    x = device.put(numbers(group.rank))
    pycomm.all_reduce(x)
    pycomm.all_reduce(x, algorithm="ring")
    device.get(x)
    go_on = device.delay()
    queries = device.runtime.queries()
    works = [pycomm.all_reduce(x, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    deadline = time.monotonic() + 60
    while device.runtime.queries() < queries + 3:  # of the watchdog
        assert time.monotonic() < deadline, "the watchdog does not look"
        time.sleep(0.01)  # it sends no notification
    go_on()
    if group.rank < 2:
        (pycomm.send if group.rank else pycomm.recv)(x, 1 - group.rank)
    device.get(x)
    while not all(work.done() for work in works):
        pass
    group.close()
    del x, works
    gc.collect()
    return list(device.runtime.contexts())


@on(*EMULATED)
def test_rank_creates_a_context_on_its_device_only(machine: Any) -> None:
    contexts = machine.run(3, uses_its_device, processes=True, transport="")
    assert contexts == ([[0], [0], [1]] if machine.shared else [[0], [1], [2]])


def keeps_the_context(group: pycomm.Group, device: Any, own: bool) -> list[int]:
    """Makes calls while this thread's device is another one, or has another library's context."""
    runtime, rank = device.runtime, group.rank
    x, y = device.put(numbers(rank)), device.empty((2, 100), "float32")
    runtime.push_own_context(device.index if own else 7)
    before = runtime.current()
    calls = [
        lambda: pycomm.all_reduce(x),
        lambda: pycomm.all_reduce(x, algorithm="ring"),
        lambda: pycomm.all_gather(x, out=y),
        lambda: pycomm.send(x, 1) if rank == 0 else pycomm.recv(x, 0),
        lambda: pycomm.all_reduce(x, async_op=True).wait(),
        lambda: pycomm.all_gather(np.zeros(3, np.float32)),
        pycomm.barrier,
        group.close,
    ]
    for call in calls:
        call()
        assert runtime.current() == before
    runtime.pop_context()
    assert device.get(x).sum() > 0
    return list(runtime.contexts())


@on(*EMULATED)
@pytest.mark.parametrize("own", [False, True], ids=["another device", "context of a library"])
def test_calls_keep_the_current_device_and_context(machine: Any, own: bool) -> None:
    contexts = machine.run(2, keeps_the_context, own, processes=True, transport="")
    assert contexts == ([[0], [0]] if machine.shared else [[0], [1]])


def starts_without_a_context(group: pycomm.Group, device: Any) -> None:
    """A thread that has used no device makes a call."""
    x = device.put(numbers(group.rank))

    def on_new_thread() -> tuple[int, int]:
        pycomm.all_reduce(x, group=group)
        return device.runtime.current()  # type: ignore[no-any-return] - the module has no types

    with ThreadPoolExecutor(1) as other:
        assert other.submit(on_new_thread).result(60) == (0, 0)


@on(*EMULATED)
def test_a_thread_without_a_context_has_none_after_a_call(machine: Any) -> None:
    machine.run(2, starts_without_a_context, processes=True, transport="")
