"""One order of launches for all groups of a device: that of the program's calls.

Emulated devices; the fake NCCL refuses collectives of several communicators whose order differs
between two ranks. Ranks are threads (tests/support/group_devices.py).
"""

from typing import Any

import numpy as np
import programs
import pytest

# pytest finds the fixture by name, so that it looks unused.
from group_devices import machine_fixture, numbers, on, on_devices  # noqa: F401 - fixture

import pycomm
from pycomm import errors

pytestmark = pytest.mark.timeout(300)

ROUNDS = 30


def alternate(group: pycomm.Group, device: Any) -> None:
    """Calls of three groups from one thread, each enqueued by the worker of its group."""
    groups = [group, *(group.split(0, group.rank) for _ in range(2))]
    arrays = [device.put(np.ones(100, "float32")) for _ in groups]
    for one, x in zip(groups, arrays, strict=True):
        pycomm.all_reduce(x, group=one)  # connects it
    for call in range(ROUNDS):
        pairs = [(arrays[i % 3], groups[i % 3]) for i in range(call, call + 4)]
        works = [pycomm.all_reduce(x, op="max", group=one, async_op=True) for x, one in pairs[:3]]
        pycomm.all_reduce(pairs[3][0], op="max", group=pairs[3][1])
        for work in works:
            work.wait()
    for x in arrays:
        assert np.array_equal(device.get(x), np.full(100, group.size, "float32"))


@on("emulated")
def test_groups_enqueue_in_the_order_of_calls(machine: Any) -> None:
    nccl = programs.emulated().nccl
    nccl.delay_calls(2000)
    try:
        machine.run(2, alternate)
    finally:
        nccl.delay_calls(0)


@on_devices(2)
@on("emulated")
def test_ranks_without_a_common_order_time_out(group: pycomm.Group, device: Any) -> None:
    """The ranks call two groups in different orders: the error names the earlier call."""
    other = group.split(0, group.rank)
    x, y = device.put(numbers(group.rank)), device.put(np.ones(10, "float32"))
    pycomm.all_reduce(x, group=group)
    pycomm.all_reduce(y, group=other)
    device.get(y)
    if group.rank == 0:
        first = pycomm.all_reduce(x, async_op=True, group=group)
        with pytest.raises(errors.Timeout, match=r"after all_reduce of group .*same order"):
            pycomm.all_reduce(y, group=other, timeout_s=1.0)
        with pytest.raises(errors.Error):
            first.wait()
    else:
        pycomm.all_reduce(y, group=other)
        with pytest.raises(errors.Error):
            while True:
                pycomm.all_reduce(y, group=other)
        group.abort("the other group has failed")
