"""Device groups: the ranks of a group for CUDA arrays, made at the first call with such arrays, and
connected at the first collective one.

Devices and NCCL come from the compiled module _cuda. Tests replace it with
`override_device_module`, to run without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pycomm import _core, config
from pycomm._arguments import integer, one_of
from pycomm._core_api import arrays, devices, nccl
from pycomm._core_api.arrays import Device
from pycomm.errors import Unsupported
from pycomm.group import Group

# Transports of CUDA arrays between hosts.
INTERNODE_TRANSPORTS = ("nccl", "tcp")
# When the ranks agree about a call: before it is enqueued, or, if they made one like it, after.
AGREEMENTS = ("before", "after")
MAX_CHANNELS = 8
MESSAGES = ("send", "recv")
# By the default algorithm of a device group: how it sends arrays, for the log.
SENT_BY = {
    "nccl": "with NCCL",
    "auto": "with NCCL inside hosts, with TCP between hosts",
    "host_staged": "through host memory",
}


class Options(NamedTuple):
    """How a device group sends arrays, as of pycomm.Group."""

    channels: int
    internode_transport: str
    agreement: str

    def check(self) -> None:
        """Raises InvalidArgument if a device group cannot have one of them."""
        integer("cuda_channels", self.channels, 1, MAX_CHANNELS)
        one_of("cuda_internode_transport", self.internode_transport, INTERNODE_TRANSPORTS)
        one_of("cuda_agreement", self.agreement, AGREEMENTS)


class _Source:
    """The module that provides devices."""

    module: Any = None  # replaces _cuda if set


def core(group: Group, device: Device, call: _core.Call) -> _core.Collectives:
    """The device group of `group` on `device`, connected unless the call is a message.

    All ranks must make their first collective call within the time limit of the call.

    Raises:
        Unsupported: no driver or GPU; or, if ranks do not share GPUs: a rank has no NCCL (raised on
            every rank) or an NCCL that refuses this device.
        Timeout: not all ranks called.
    """
    if device.kind == "cpu":
        return group.core
    found = group._devices.get(device.index)
    if found is None:
        options = Options(group.cuda_channels, group.cuda_internode_transport, group.cuda_agreement)
        found = _make(group.core._capsule(), device.index, group._timeout_s, options)
        group._devices[device.index] = found
    if not found.formed and call.operation not in MESSAGES:
        _form(found, device.index, call.timeout_s or group._timeout_s)
    return found


def on_device(
    host: object, kind: str, index: int, timeout_s: float, *options: Any
) -> tuple[object, Callable[[float], None], Callable[[int], Any]]:
    """The same for torch, which connects the ranks with the second result, within a limit in
    seconds. The third makes torch's stream of an address.

    `host` and the first result are capsules of groups; `kind` is torch's device type; `options` are
    the fields of Options.

    Raises:
        Unsupported: also for devices of another kind.
    """
    if kind != arrays.torch_kind:
        raise Unsupported(
            f"tensors on {kind} are not supported: move them to host memory or a CUDA device"
        )
    made = _make(host, index, timeout_s, Options(*options))
    module = getattr(sys.modules["torch"], kind)
    stream_at = functools.partial(module.ExternalStream, device=index)
    return made._capsule(), functools.partial(_form, made, index), stream_at


def is_unknown(kind: str) -> bool:
    """Whether no compiled module serves devices of this kind, as torch names it. Logs that once."""
    found = _Source.module is not None or devices.has_cuda_module()
    if kind == arrays.torch_kind and found:
        return False
    _log_unknown(kind)
    return True


@functools.cache
def _log_unknown(kind: str) -> None:
    logging.getLogger("pycomm").info(
        "tensors on %s are copied through host memory: there is no compiled module for them", kind
    )


def stream(device: Device, array: Any) -> int:
    """The caller's current stream on the device; 0 for the default stream and for host memory."""
    return devices.queue(device, array)[1]


def _make(host: object, index: int, timeout_s: float, options: Options) -> _core.Collectives:
    options.check()
    module = devices.cuda_module() if _Source.module is None else _Source.module
    opened = module.open_device(index, devices.empty_caches)
    library: Any = None
    why_none = ""
    try:
        library = nccl.load(module)
    except Unsupported as error:  # ranks that share a GPU need no NCCL: _core decides
        why_none = str(error)
    sharing = config.nccl_sharing()
    channels, transport, agreement = options
    given = channels, transport == "nccl", agreement == "after"
    capsule = library and library._capsule()
    made = _core.on_device(host, opened, capsule, why_none, sharing, given, timeout_s)
    logger = logging.getLogger("pycomm")
    if logger.isEnabledFor(logging.INFO):
        logger.info(
            'group "%s": rank %d of %d is on device %d: %s, %s',
            *(made.name, made.rank, made.size, index, _core.describe_device(opened)),
            f"NCCL {library.version}" if library else "no NCCL",
        )
    return made


def _form(made: _core.Collectives, index: int, limit_s: float) -> None:
    """Connects the ranks of a device group; logs how their arrays are sent."""
    made.form(limit_s)
    algorithm = made.stats().algorithm
    logger = logging.getLogger("pycomm")
    logger.info(
        'group "%s": rank %d sends arrays of device %d %s',
        *(made.name, made.rank, index, SENT_BY[algorithm]),
    )
    if made.rank == 0 and algorithm == "host_staged":
        logger.warning(
            "ranks of the group %r share a GPU, which NCCL does not support: their arrays are sent "
            "through host memory, which is slow",
            made.name,
        )


@contextlib.contextmanager
def override_device_module(by: Any, kind: str = "cuda") -> Iterator[None]:
    """A context in which new groups take devices and NCCL from the module `by`. For tests.

    `kind` is torch's device type of these devices.
    """
    before = _Source.module, arrays.torch_kind  # process-wide, like _cuda
    _Source.module, arrays.torch_kind = by, kind
    try:
        yield
    finally:
        _Source.module, arrays.torch_kind = before
