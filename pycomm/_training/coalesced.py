"""Many tensors in one call: packed into one flat array per dtype and device and unpacked again, or
serialized as torch saves them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycomm import _core, collectives
from pycomm._arguments import integer, refuse
from pycomm._core_api import arrays
from pycomm.default_group import chosen
from pycomm.errors import Error, InvalidArgument
from pycomm.group import Group


def bcast_list_(
    tensors: Iterable[Tensor | np.ndarray], src: int = 0, group: Group | None = None
) -> None:
    """Broadcasts every tensor of a list from rank `src`, in place: one call per dtype and device.

    Collective.

    Args:
        tensors: the tensors or NumPy arrays to overwrite; the same shapes, dtypes and kinds of
            device on every rank, in the same order.
        src: the rank whose elements are sent.
        group: the group to call in; None: the default group.

    Raises:
        InvalidArgument: an item is neither, or is a read-only array.
        Error: as pycomm.broadcast.
    """
    group, src = chosen(group), integer("src", src)
    if isinstance(tensors, (Tensor, np.ndarray)) or not isinstance(tensors, Iterable):
        refuse("tensors", tensors, "a list of tensors or NumPy arrays")
    listed = [_tensor(item) for item in tensors]
    new = _through(listed, lambda flat: collectives.broadcast(flat, src, group=group))
    if group.rank != src:
        for tensor, content in zip(listed, new, strict=True):
            tensor.detach().copy_(content)


def _tensor(item: Any) -> Tensor:
    """The tensor, or one that shares the memory of the NumPy array."""
    if isinstance(item, Tensor):
        if not item.is_complex():
            arrays.check_tensor("tensors", item)
        return item
    if not isinstance(item, np.ndarray) or not item.flags.writeable:
        what = "a read-only array" if isinstance(item, np.ndarray) else type(item).__name__
        raise InvalidArgument(
            f"bcast_list_: got {what}, expected tensors or writable NumPy arrays to overwrite"
        )
    return torch.from_numpy(item)


def bcast_value(value: Any, src: int, group: Group) -> Any:
    """Broadcasts rank `src`'s plain values and tensors, as torch.load takes with weights_only=True.

    Collective. Returns tensors in host memory; rank `src` gets its own `value`.

    Raises:
        Error: the value cannot be serialized, on every rank; on `src` torch's own error. The group
            stays usable.
    """
    fault: Exception | None = None
    whole = b""
    if group.rank == src:
        try:
            whole = _saved(value)
        except Exception as error:  # of any kind: the other ranks wait for the length
            fault, whole = error, f"{type(error).__name__}: {error}".encode()
    # Negative: the length of an error text.
    length = torch.tensor([-len(whole) if fault else len(whole)])
    collectives.broadcast(length, src, group=group)
    content = np.empty(abs(int(length)), np.uint8)
    if group.rank == src:
        content[:] = np.frombuffer(whole, np.uint8)
    collectives.broadcast(content, src, group=group)
    if fault:
        raise fault
    if group.rank == src:
        return value
    if length < 0:
        text = content.tobytes().decode(errors="replace")
        raise Error(f"rank {src} could not send its value: {text}", rank=group.rank, peer=src)
    return torch.load(io.BytesIO(content.tobytes()), "cpu", weights_only=True)


def _saved(value: Any) -> bytes:
    """The bytes that torch.save writes; raises if torch.load could not read them."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    torch.load(file, "meta", weights_only=True)
    return file.getvalue()


def average(tensors: Sequence[Tensor], group: Group, tag: int = 0) -> list[Tensor]:
    """The means over all ranks of floating-point tensors, the same bits on every rank.

    Collective. The arguments are unchanged, also if the call fails. Ranks compare `tag`.
    """
    call = _core.Call("all_reduce", op="avg", tag=tag)
    return _through(tensors, lambda flat: call(group, flat, flat, flat, False))


def _through(tensors: Sequence[Tensor], call: Callable[[Tensor], object]) -> list[Tensor]:
    """Copies of `tensors` after `call` on the flat array that contains each."""
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault((tensor.dtype, tensor.device), []).append(i)
    results = list(tensors)
    for places in alike.values():
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in places])
        call(flat)
        parts = torch.split(flat, [tensors[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            results[i] = part.view(tensors[i].shape)
    return results
