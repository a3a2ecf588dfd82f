"""Rings over large device arrays in channels: the same bits, twice the launches, also in graphs.

Emulated devices with a fake NCCL, and GPUs; ranks are threads (tests/support/group_devices.py).
"""

from typing import Any

import pytest

# pytest finds the fixture by name, so that it looks unused.
from group_devices import machine_fixture, odd, on, on_devices  # noqa: F401 - fixture

import pycomm
from pycomm import errors

pytestmark = pytest.mark.timeout(300)

LARGE = (2 << 20) // 4 + 7  # float32: two channels of a MiB each, and an odd count


def rings(group: pycomm.Group, device: Any, counted: bool) -> None:
    if group.rank == 0:  # rank 0's option decides
        group.cuda_channels = 2
    x = odd(group.rank, LARGE, "float32")
    there, small = device.put(x), device.put(x[:1000])
    pycomm.all_reduce(there, algorithm="ring")
    here = pycomm.all_reduce(x.copy(), algorithm="ring")
    assert device.get(there).tobytes() == here.tobytes()
    if counted:
        counts = device.counts()
        assert counts["groups"] == counts["sends"] == 2 * 2 * (group.size - 1)
        # All pieces but two, which are within 128 elements of the mean.
        sent = 2 * LARGE * (group.size - 1) / group.size
        assert abs(counts["bytes_sent"] / 4 - sent) < 2 * 128
    device.write(there, x)
    pycomm.barrier()  # no allocation while another thread captures
    device.capture()
    pycomm.all_reduce(there, algorithm="ring")
    pycomm.all_reduce(small, algorithm="ring")  # in one channel, after those of the large array
    launch = device.end_capture()
    launch()
    assert device.get(there).tobytes() == here.tobytes()
    wanted = pycomm.all_reduce(x[:1000].copy(), algorithm="ring")
    assert device.get(small).tobytes() == wanted.tobytes()


@on("emulated", "cuda")
def test_channels_change_no_bit(machine):
    machine.run(3, rings, machine.emulated)


@on_devices(2)
@on("emulated", "cuda")
def test_channel_count_limits(group: pycomm.Group, device: Any) -> None:
    group.cuda_channels = 9
    with pytest.raises(errors.InvalidArgument, match="cuda_channels: got 9"):
        pycomm.all_reduce(device.put(odd(group.rank, 10, "float32")))
