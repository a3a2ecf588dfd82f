"""Gradient buckets: parameters in the order of their gradients, grouped for one call each.

A bucket is one flat array; the gradients are views into it, so they are stored once. `fuse` is a
pure function of sizes and limits, so all ranks make the same buckets.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pycomm import memory
from pycomm._arguments import integer, positive
from pycomm._core_api import arrays
from pycomm.compress.parameter_state import is_dense
from pycomm.errors import InvalidArgument
from pycomm.group import Group

MB = 1 << 20
FIRST_BYTES = MB  # a small first bucket starts communication early (as in torch's DDP)


@dataclass(eq=False)
class Slot:
    """A parameter and the place of its gradient. Slots of different `kind` do not share a
    bucket."""

    name: str
    parameter: nn.Parameter
    layer: int
    sparse: bool = False  # its gradient is sparse in the first dimension
    kind: bool = False
    place: int = 0  # index among all slots
    done: bool = False  # this backward pass has computed the gradient
    bucket: Bucket | None = None
    view: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Size of the gradient in bytes."""
        return self.parameter.numel() * self.parameter.element_size()


@dataclass(frozen=True)
class Limits:
    """Upper limits of a bucket: bytes, and layers (modules that own parameters) unless None."""

    bytes: int
    layers: int | None = None

    @classmethod
    def of(cls, bucket_mb: float | str, bucket_layers: int | None, total_bytes: int) -> Limits:
        """From DataParallel's arguments; "auto" is a tenth of the gradients, limited to 1 to 64
        MB."""
        if type(bucket_mb) is str and bucket_mb == "auto":
            bucket_mb = min(max(total_bytes / MB / 10, 1.0), 64.0)
        positive("bucket_mb", bucket_mb, '"auto"')
        if bucket_layers is not None:
            integer("bucket_layers", bucket_layers, 1)
        return cls(int(float(bucket_mb) * MB), bucket_layers)


class Bucket:
    """Gradients that are sent together, of one dtype, device and kind."""

    def __init__(self, slots: Sequence[Slot], group: Group) -> None:
        first = slots[0].parameter
        self.slots = tuple(slots)
        self.parameters = [slot.parameter for slot in slots]
        self.check = zlib.crc32(repr([slot.name for slot in slots]).encode())
        count = sum(slot.parameter.numel() for slot in slots)
        self.flat = _zeros(count, first, group)
        self.missing = len(slots)  # gradients that this backward pass has not computed yet
        self._stream: Any = None  # on a device: the stream of the last gradient
        self.views: list[Tensor] = []
        self.watch_parameters()
        offset = 0
        for slot in slots:
            view = _view(self.flat, offset, slot.parameter)
            offset += slot.parameter.numel()
            self.views.append(view)
            if slot.view is not None and slot.parameter.grad is slot.view:
                slot.parameter.grad = view.copy_(slot.view)  # keeps accumulated gradients
            slot.bucket, slot.view = self, view

    def watch_parameters(self) -> None:
        """Makes the current stream wait for the gradients so far: autograd computes each gradient
        on the stream of its forward pass.
        """
        if self.flat.is_cpu:
            return
        here = arrays.current_stream(self.flat.device.index)
        if self._stream is not None and self._stream != here:
            here.wait_stream(self._stream)
        self._stream = here


def _zeros(count: int, like: Tensor, group: Group) -> Tensor:
    """Zeros in memory that the group's ranks can map, if possible: reductions then need no staging
    copy."""
    if like.is_cpu:
        shared = memory.empty_for(group, count, like.dtype)
        if shared is not None:
            zeros: Tensor = shared.zero_()
            return zeros
    return torch.zeros(count, dtype=like.dtype, device=like.device)


def _view(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """The part of `flat` from `offset` on, with the parameter's shape, and its strides if dense."""
    if is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


def slots_of(module: nn.Module) -> list[Slot]:
    """The parameters that require a gradient, in the order of the module."""
    slots: dict[nn.Parameter, Slot] = {}
    for layer, (path, part) in enumerate(module.named_modules()):
        sparse = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in slots:
                full = f"{path}.{name}" if path else name
                slots[parameter] = Slot(full, parameter, layer, sparse, place=len(slots))
    if not slots:
        raise InvalidArgument("the module has no parameter that requires a gradient")
    return list(slots.values())


def fuse(slots: Iterable[Slot], limits: Limits) -> list[list[Slot]]:
    """Divides slots, in the order of their gradients, into lists that share a bucket.

    A bucket is full at either limit; a gradient above the limit has its own bucket. Buckets of
    several dtypes or kinds are filled concurrently, and ordered by their last gradients.
    """
    full: list[list[Slot]] = []
    open_: dict[tuple[object, ...], list[Slot]] = {}
    position: dict[Slot, int] = {}
    for slot in slots:
        position[slot] = len(position)
        key = (slot.parameter.dtype, slot.parameter.device, slot.kind)
        bucket = open_.setdefault(key, [])
        if bucket and _is_full(bucket, slot, limits, first=not full):
            full.append(bucket)
            bucket = open_[key] = []
        bucket.append(slot)
    return sorted(full + list(open_.values()), key=lambda bucket: position[bucket[-1]])


def _is_full(bucket: list[Slot], new: Slot, limits: Limits, first: bool) -> bool:
    most = min(limits.bytes, FIRST_BYTES) if first else limits.bytes
    if sum(slot.bytes for slot in bucket) + new.bytes > most:
        return True
    layers = {slot.layer for slot in (*bucket, new)}
    return limits.layers is not None and len(layers) > limits.layers
