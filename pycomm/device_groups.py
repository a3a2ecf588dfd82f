"""The group of a group's ranks for arrays on CUDA devices: made at the first call with such arrays.

Devices and NCCL come from the compiled module _cuda. `replaced` puts another in its place: that is
how tests run all of this where there is no GPU. Called by calls.py.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from pycomm import _core, nccl
from pycomm.arrays import Device
from pycomm.errors import Unsupported
from pycomm.group import Group
from pycomm.kernels import devices

__all__ = ["core", "replaced", "stream"]

_module: Any = None  # what stands in for _cuda


def core(group: Group, device: Device) -> _core.Group:
    """The group of `group`'s ranks, each on a device of its own; collective where it is not yet.

    Raises:
        Unsupported: no driver, no such GPU, no NCCL, or one that refuses this device.
        Timeout: not all ranks came to make it.
    """
    if device.kind == "cpu":
        return group._core
    found = group._devices.get(device.index)
    if found is None:
        module = _compiled()
        opened = module.open_device(device.index)
        library = nccl.load(module)._capsule()
        found = _core.on_device(group._core, opened, library, group._timeout_s)
        group._devices[device.index] = found
    return found


def stream(device: Device, array: Any) -> int:
    """The caller's current stream on the device; 0 for the default one, and in host memory."""
    return devices.queue(device, array)[1]


def _compiled() -> Any:
    if _module is not None:
        return _module
    if importlib.util.find_spec("pycomm._cuda") is None:
        raise Unsupported(devices.HOW_TO_BUILD)
    return importlib.import_module("pycomm._cuda")


@contextlib.contextmanager
def replaced(by: Any) -> Iterator[None]:
    """Within it, groups that are made take devices and NCCL from the module `by`. For tests."""
    global _module  # noqa: PLW0603 - of the whole process, as _cuda is
    before, _module = _module, by
    try:
        yield
    finally:
        _module = before
