"""One order of launches for all groups of a device: that of the program's calls.

Emulated devices; the fake NCCL refuses collectives of several communicators whose order differs
between two ranks. Ranks are threads (tests/support/group_devices.py).
"""

from typing import Any

import numpy as np
import programs
import pytest

# pytest finds the fixture by name, so that it looks unused.
from group_devices import machine_fixture, on  # noqa: F401 - fixture

import pycomm

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
