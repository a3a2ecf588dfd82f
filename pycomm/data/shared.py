"""One decoded copy of a data set per host: DataLoader(shared=True).

memory of the host   sample 0 | sample 1 | sample 2 | ...     each of the same layout
decoded by           rank 0     rank 1     rank 0             of two ranks on the host
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data

from pycomm.data.memory import HostMemory, agreed
from pycomm.data.nested import on_values
from pycomm.errors import InvalidArgument, Mismatch
from pycomm.group import Group

ALIGNMENT = 16  # of each value in memory, in bytes; at least the size of any element


def shared_copy(dataset: Any, group: Group, **workers: Any) -> _Copy:
    """The samples of a data set, of which each rank of the host decodes a share. Collective.

    Args:
        dataset: the same on every rank, with a length, and samples of the same layout.
        group: the group whose ranks share it.
        workers: torch's options of the processes in which this rank decodes.

    Raises:
        InvalidArgument: a sample cannot be stored: on the rank that decoded it. The other ranks
            raise Error.
        Mismatch: the ranks' data sets differ in length or layout.
        Exception: the data set's own error, on the rank that decoded the sample.
    """
    hosts = group.core.hosts
    here = [rank for rank, host in enumerate(hosts) if host == hosts[group.rank]]
    layout: Any = None

    def inspect() -> str:
        nonlocal layout
        count = len(dataset)
        layout = _layout(dataset[0] if count else (), 0)
        return f"{count} samples of {layout}"

    found = agreed(group, inspect, _failed)
    if len(set(found)) > 1:
        other = next(rank for rank, text in enumerate(found) if text != found[0])
        raise Mismatch(
            f"shared=True: the data sets differ: rank 0 has {found[0]}, rank {other} {found[other]}"
        )
    copy = _Copy(HostMemory.allocate(len(dataset) * layout.stride, group), len(dataset), layout)

    def fill() -> None:
        mine = range(here.index(group.rank), len(dataset), len(here))
        decoded = _Decoding(dataset, copy)
        for _ in data.DataLoader(decoded, batch_size=None, sampler=mine, **workers):
            pass

    agreed(group, fill, _failed)
    return copy


def _failed(rank: int, text: str) -> str:
    return f"shared=True: rank {rank} failed: {text}"


class _Layout:
    """Where the values of a sample are, from its first byte, and how they are nested."""

    def __init__(self) -> None:
        self.outline: Any = None  # the sample with the number of each value in its place
        self.values: list[tuple[int, int, str, tuple[int, ...]]] = []  # first, last, type, shape
        self.stride = 0

    def __repr__(self) -> str:
        return f"{self.outline} with {[(kind, shape) for *_, kind, shape in self.values]}"


def _layout(sample: Any, index: int) -> _Layout:
    """The layout of a sample that has no value of another kind."""
    made = _Layout()

    def add(value: Any) -> int:
        kind, shape, size = _described(value, index)
        first = made.stride
        made.values.append((first, first + size, kind, shape))
        made.stride += -(-size // ALIGNMENT) * ALIGNMENT
        return len(made.values) - 1

    made.outline = on_values(sample, add)
    return made


def _described(value: Any, index: int) -> tuple[str, tuple[int, ...], int]:
    """Type, shape and bytes of a value; the type starts with "torch." for a tensor."""
    if isinstance(value, Tensor) and value.is_cpu and value.layout is torch.strided:
        return str(value.dtype), tuple(value.shape), value.numel() * value.element_size()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind not in "OV":
        name = "array" if isinstance(value, np.ndarray) else "scalar"
        return f"{name} {value.dtype.str}", value.shape, value.nbytes
    if type(value) in (bool, int, float):
        return type(value).__name__, (), 8
    what = f"tensor on {value.device}" if isinstance(value, Tensor) else type(value).__name__
    raise InvalidArgument(
        f"shared=True: sample {index} has a {what}, expected CPU tensors, NumPy arrays and numbers"
    )


NUMBERS = {"bool": np.int64, "int": np.int64, "float": np.float64}


class _Copy(data.Dataset[Any]):
    """The samples in the memory of the host. Each access returns new tensors and arrays."""

    def __init__(self, memory: HostMemory, count: int, layout: _Layout) -> None:
        self._memory, self._count, self._layout = memory, count, layout

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        number = operator.index(index)
        if not 0 <= number < self._count:
            raise IndexError(f"sample {number} of {self._count}")
        values = [self._value(number, *where) for where in self._layout.values]
        return on_values(self._layout.outline, values.__getitem__)

    def _value(self, index: int, first: int, last: int, kind: str, shape: tuple[int, ...]) -> Any:
        at = index * self._layout.stride
        raw = self._memory.bytes[at + first : at + last].copy()  # the caller may write to it
        if kind in NUMBERS:
            return (bool, int, float)[list(NUMBERS).index(kind)](raw.view(NUMBERS[kind])[0])
        if kind.startswith("torch."):
            dtype = getattr(torch, kind.removeprefix("torch."))
            if not len(raw):
                return torch.empty(shape, dtype=dtype)
            return torch.from_numpy(raw).view(dtype).reshape(shape)
        name, _, typestr = kind.partition(" ")
        array = raw.view(typestr).reshape(shape) if len(raw) else np.empty(shape, typestr)
        return array if name == "array" else array[()]

    def store(self, index: int, sample: Any) -> None:
        """Writes a sample.

        Raises:
            InvalidArgument: its layout is not that of sample 0.
        """
        layout = _layout(sample, index)
        if repr(layout) != repr(self._layout):
            raise InvalidArgument(
                f"shared=True: sample {index} has {layout}, sample 0 has {self._layout}: the "
                "samples must have the same shapes and dtypes"
            )
        at = index * layout.stride
        values: list[Any] = []
        on_values(sample, values.append)
        for (first, last, kind, _), value in zip(layout.values, values, strict=True):
            self._memory.bytes[at + first : at + last] = _raw(value, kind)


def _raw(value: Any, kind: str) -> Any:
    """The bytes of a value."""
    if kind in NUMBERS:
        value = np.array(value, NUMBERS[kind])
    elif isinstance(value, Tensor):
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy()
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


class _Decoding(data.Dataset[Any]):
    """Stores each sample that is read, in the process that reads it, and returns nothing."""

    def __init__(self, dataset: Any, copy: _Copy) -> None:
        self._dataset, self._copy = dataset, copy

    def __getitem__(self, index: int) -> None:
        self._copy.store(index, self._dataset[index])


class Transformed(data.Dataset[Any]):
    """A data set with indices, with a function applied to each sample."""

    def __init__(self, dataset: Any, transform: Callable[[Any], Any]) -> None:
        self._dataset, self._transform = dataset, transform

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._transform(self._dataset[index])
