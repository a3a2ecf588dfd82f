"""A step of DGC on devices, from the gradient to the parameters: the kernel, the exchange of raw
packets and the fused decoding and update, eager and as one graph. Emulated devices with a fake
NCCL, and GPUs.

Ranks are threads with a device each, or share one (tests/support/group_devices.py).
"""

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

# pytest finds the fixture by name, so that it looks unused.
from group_devices import machine_fixture  # noqa: F401 - fixture

import pycomm
from pycomm import kernels
from pycomm._core_api import devices

pytestmark = pytest.mark.timeout(300)

COUNT, K, STEPS = 5000, 40, 5


def gradient(rank: int, step: int) -> Any:
    """Large enough that the residual of earlier steps matters."""
    rng = np.random.default_rng((rank, step))
    return (rng.laplace(size=COUNT) * (1 + 20 * (step == 2))).astype(np.float32)


class Training:
    """A rank's arrays, on a device or in host memory, and one step with them."""

    def __init__(self, group: pycomm.Group, put: Any) -> None:
        self.group = group
        self.parameter = put(np.linspace(-1, 1, COUNT, dtype=np.float32))
        self.gradient, self.u, self.v = (put(np.zeros(COUNT, np.float32)) for _ in range(3))
        self.packet = put(np.zeros(K, np.int32)), put(np.zeros(K, np.float32))
        every = (group.size, K)
        self.packets = put(np.zeros(every, np.int32)), put(np.zeros(every, np.float32))
        self.room = put(np.zeros(1 << 20, np.uint8))

    def step(self) -> None:
        indices, values = self.packet
        kernels.dgc_step(
            self.gradient,
            self.u,
            self.v,
            K,
            momentum=0.9,
            weight=self.parameter,
            weight_decay=1e-3,
            indices=indices,
            values=values,
            workspace=self.room,
        )
        for mine, every in zip(self.packet, self.packets, strict=True):
            pycomm.all_gather(mine, every, group=self.group)
        rows = [tuple(every[rank] for every in self.packets) for rank in range(self.group.size)]
        kernels.decode_update(self.parameter, rows, lr=0.1, scale=1 / self.group.size)

    @property
    def state(self) -> tuple[Any, Any, Any]:
        return self.parameter, self.u, self.v


def in_host_memory(group: pycomm.Group) -> list[list[bytes]]:
    """Parameters, u and v after each step, on the CPU."""
    training = Training(group, np.copy)
    seen = []
    for step in range(STEPS):
        training.gradient[:] = gradient(group.rank, step)
        training.step()
        seen.append([x.tobytes() for x in training.state])
    return seen


def on_a_device(group: pycomm.Group, device: Any, captured: bool) -> list[list[bytes]]:
    """The same on a device; if `captured`, all steps but the first are replays of one graph."""
    training = Training(group, device.put)
    seen, launch = [], training.step
    for step in range(STEPS):
        device.write(training.gradient, gradient(group.rank, step))
        launch()
        seen.append([device.get(x).tobytes() for x in training.state])
        if captured and step == 0:
            device.capture()
            training.step()
            launch = device.end_capture()
    return seen


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_steps_equal_the_cpu_bit_by_bit(machine, captured):
    with ExitStack() as stack:
        if machine.emulated:
            import programs

            stack.enter_context(devices.override_kernels("cuda", programs.emulated().kernels))
        found = machine.run(3, on_a_device, captured)
    wanted = pycomm.testing.run_ranks(3, in_host_memory)
    for rank, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        for step in range(STEPS):
            assert mine[step] == theirs[step], (rank, step)
        assert mine[-1][0] == found[0][-1][0]  # all ranks have the same parameters
    assert len({seen[0] for seen in found[0]}) == STEPS  # and every step changed them
