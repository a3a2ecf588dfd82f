"""The devices on which a rank creates a CUDA context: hundreds of megabytes each.

Ranks are processes with an emulated device each (tests/support/group_devices.py). The emulated
runtime creates contexts as CUDA does since version 12: every call does that needs one, on the
thread's current device, and cudaSetDevice itself.
"""

import gc
import time
from typing import Any

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
