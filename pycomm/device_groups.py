"""The group of a group's ranks for arrays on CUDA devices: made at the first call with such arrays.

Devices and NCCL come from the compiled module _cuda. `override_device_module` puts another in its
place: that is how tests run all of this where there is no GPU. Called by calls.py and, for torch's
tensors, by the module _c10d.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

from pycomm import _core, arrays, config, nccl
from pycomm.arrays import Device
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import Group
from pycomm.kernels import devices

__all__ = [
    "check_channels",
    "check_internode_transport",
    "core",
    "on_device",
    "override_device_module",
    "stream",
]

# By what arrays on CUDA devices travel from host to host.
INTERNODE_TRANSPORTS = ("nccl", "tcp")
MAX_CHANNELS = 8


class _Source:
    """Where devices come from."""

    module: Any = None  # what stands in for _cuda


def core(group: Group, device: Device, limit_s: float = 0.0) -> _core.Group:
    """The group of `group`'s ranks, each on a device; collective where it is not yet.

    All ranks have to come within `limit_s`, or within the group's limit if that is 0.

    Raises:
        Unsupported: no driver, no such GPU; where no ranks share one, a rank has no NCCL, which
            all ranks are told, or one that refuses this device.
        Timeout: not all ranks came to make it, as where the first call is a send or a recv of two.
    """
    if device.kind == "cpu":
        return group._core
    found = group._devices.get(device.index)
    if found is None:
        lines = group.cuda_channels, group.cuda_internode_transport
        timeout_s = group._timeout_s
        found = _meet(group._core._capsule(), device.index, timeout_s, limit_s or timeout_s, *lines)
        group._devices[device.index] = found
    return found


def on_device(
    host: object, kind: str, index: int, timeout_s: float, channels: int, internode_transport: str
) -> object:
    """The same for torch: `host` and the result are capsules of groups; `kind` is torch's word.

    Raises:
        Unsupported: also for devices of another kind.
    """
    if kind != arrays.torch_kind:
        raise Unsupported(
            f"pycomm takes tensors in host memory and on CUDA devices, not on {kind}: move them"
        )
    return _meet(host, index, timeout_s, timeout_s, channels, internode_transport)._capsule()


def stream(device: Device, array: Any) -> int:
    """The caller's current stream on the device; 0 for the default one, and in host memory."""
    return devices.queue(device, array)[1]


def check_channels(channels: int) -> None:
    """Raises InvalidArgument: a group on devices does not have so many."""
    if not 1 <= channels <= MAX_CHANNELS:
        raise InvalidArgument(
            f"invalid cuda_channels: got {channels}, expected 1 to {MAX_CHANNELS}"
        )


def check_internode_transport(way: str) -> None:
    """Raises InvalidArgument: there is no such transport between hosts."""
    if way not in INTERNODE_TRANSPORTS:
        known = ", ".join(map(repr, INTERNODE_TRANSPORTS))
        raise InvalidArgument(
            f"invalid cuda_internode_transport: got {way!r}, expected one of {known}"
        )


def _meet(
    host: object,
    index: int,
    timeout_s: float,
    limit_s: float,
    channels: int,
    internode_transport: str,
) -> _core.Group:
    check_channels(channels)
    check_internode_transport(internode_transport)
    module = _compiled()
    opened = module.open_device(index)
    library, why_none = None, ""
    try:
        library = nccl.load(module)._capsule()
    except Unsupported as error:  # ranks that share a GPU need none: _core says what becomes of it
        why_none = str(error)
    shares = config.nccl_shares_gpus()
    lines = channels, internode_transport == "nccl"
    made = _core.on_device(host, opened, library, why_none, shares, lines, timeout_s, limit_s)
    if made.rank == 0 and made.stats().algorithm == "host_staged":
        logging.getLogger("pycomm").warning(
            "ranks of the group %r share a GPU, which NCCL refuses: their arrays there travel "
            "through host memory, which is slow",
            made.name,
        )
    return made


def _compiled() -> Any:
    if _Source.module is not None:
        return _Source.module
    if importlib.util.find_spec("pycomm._cuda") is None:
        raise Unsupported(devices.HOW_TO_BUILD)
    return importlib.import_module("pycomm._cuda")


@contextlib.contextmanager
def override_device_module(by: Any, kind: str = "cuda") -> Iterator[None]:
    """Within it, groups that are made take devices and NCCL from the module `by`. For tests.

    `kind` is what torch calls devices of these.
    """
    before = _Source.module, arrays.torch_kind  # of the whole process, as _cuda is
    _Source.module, arrays.torch_kind = by, kind
    try:
        yield
    finally:
        _Source.module, arrays.torch_kind = before
