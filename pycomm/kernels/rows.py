"""Lists of arrays for one call; row i has element i of each list.

A DGC step has several hundred small tensors, and checks in Python would take longer than the
kernel. So _core checks all of them in one pass. If that fails, they are checked one by one to find
the error. Nothing is cached between calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycomm import _core
from pycomm._core_api import arrays
from pycomm._core_api.arrays import ArrayRef, Device
from pycomm.errors import InvalidArgument
from pycomm.kernels import inputs

Lists = Mapping[str, list[Any]]


@dataclass(slots=True)
class Rows:
    """Arrays by list and row. Arrays of a list have one dtype, arrays of a row one count.

    Attributes:
        words: uint64 [n, lists + 1]: addresses, then the number of elements of each array of the
            row.
        memory: uint64 [lists, n, 2]: addresses and bytes.
        dtypes: of each list, by name.
        device: of all.
        given: the arrays, which own the memory.
        flat: whether each has one dimension.
    """

    words: NDArray[np.uint64]
    memory: NDArray[np.uint64]
    dtypes: dict[str, str]
    device: Device
    given: Lists
    flat: bool

    @classmethod
    def of(cls, lists: Lists, dtypes: Mapping[str, Collection[str]], call: str, *,
           write: Collection[str] = ()) -> Rows:  # fmt: skip
        """Validates lists of one length, which is not 0, against the dtypes allowed for each.

        Raises:
            InvalidArgument, Unsupported: as inputs.array; or arrays of a list differ in dtype,
                arrays of a row in shape, or arrays are on several devices.
        """
        seen = cls.try_fast(lists)
        if seen is not None and all(seen.dtypes[name] in dtypes[name] for name in lists):
            return seen
        as_array_ref = {
            name: _located(each, name, dtypes[name], name in write) for name, each in lists.items()
        }
        first = next(iter(lists))
        for i, row in enumerate(zip(*as_array_ref.values(), strict=True)):
            for name, x in zip(as_array_ref, row, strict=True):
                _same_dtype(name, i, x, as_array_ref[name][0])
                inputs.same_shape(row[0], x, (first, name))
        every = [x for each in as_array_ref.values() for x in each]
        inputs.same_device(call, *every)
        columns = [[x.pointer for x in each] for each in as_array_ref.values()]
        counts = [x.count for x in as_array_ref[first]]
        words = np.array(list(zip(*columns, counts, strict=True)), np.uint64)
        memory = [[(x.pointer, x.nbytes) for x in each] for each in as_array_ref.values()]
        kinds = {name: each[0].dtype for name, each in as_array_ref.items()}
        flat = all(len(x.shape) == 1 for x in every)
        return cls(words, np.array(memory, np.uint64), kinds, every[0].device, lists, flat)

    @classmethod
    def try_fast(cls, lists: Lists) -> Rows | None:
        """The same in one pass, without checks of dtypes; None if an array needs a closer check."""
        found = _core.rows(tuple(lists.values()))
        if found is None:
            return None
        words, memory, dtypes, gpu, flat = found
        device = arrays.HOST if gpu < 0 else Device("cuda", gpu)
        return cls(words, memory, dict(zip(lists, dtypes, strict=True)), device, lists, flat)

    def __len__(self) -> int:
        return len(self.words)

    @property
    def counts(self) -> NDArray[np.uint64]:
        """Elements of each row's arrays."""
        return self.words[:, -1]

    @property
    def array(self) -> Any:
        """The first array."""
        return next(iter(self.given.values()))[0]

    @property
    def dtype(self) -> str:
        """The dtype of the first list."""
        return next(iter(self.dtypes.values()))

    def spans(self, *names: str) -> list[inputs.Spans]:
        """The memory of these lists."""
        return [
            inputs.Spans(words, self.device)
            for name, words in zip(self.given, self.memory, strict=True)
            if name in names
        ]


def _located(given: list[Any], name: str, dtypes: Collection[str], write: bool) -> list[ArrayRef]:
    label = "{}[{}]" if len(given) > 1 else "{}"
    return [
        inputs.array(x, label.format(name, i), dtypes, write=write) for i, x in enumerate(given)
    ]


def _same_dtype(name: str, i: int, one: ArrayRef, first: ArrayRef) -> None:
    if one.dtype != first.dtype:
        raise InvalidArgument(
            f"invalid {name}[{i}]: got dtype {one.dtype}, expected {first.dtype}, as {name}[0] has"
        )
