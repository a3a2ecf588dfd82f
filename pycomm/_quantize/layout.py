"""The blocks of an array, and the rank that owns each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycomm.kernels.quantized import BLOCK, Blocks


def blocks_of(count: int) -> int:
    """The number of blocks of an array of `count` elements."""
    return -(-count // BLOCK)


class Layout:
    """Consecutive arrays in one flat array, each cut into blocks of 4096 elements.

    Block b of an array whose first block has the number f is owned by rank (f + b) % size. So the
    blocks and their owners do not depend on which arrays are exchanged together.

    Args:
        arrays: for each array the number of elements, and the number of its first block.
        rank, size: of the group.

    Attributes:
        count: elements of all arrays.
        blocks: all blocks, by owner; those of an owner ascend.
        own_blocks: this rank's blocks, without the elements between them.
    """

    def __init__(self, arrays: Sequence[tuple[int, int]], rank: int, size: int) -> None:
        self.arrays = tuple(arrays)
        self.rank, self.size = rank, size
        self.count = sum(count for count, _ in arrays)
        offsets, counts, owners = (np.concatenate(part) for part in zip(*_cut(arrays), strict=True))
        owners = owners % size
        order = np.argsort(owners, kind="stable")
        self.blocks = Blocks(offsets[order], counts[order])
        self._by_owner = [Blocks.packed(counts[owners == owner]) for owner in range(size)]
        self.own_blocks = self._by_owner[rank]

    @property
    def own_count(self) -> int:
        """Elements of this rank's blocks."""
        return self.own_blocks.end

    def sizes(self, bits: int) -> list[int]:
        """The bytes of each owner's blocks."""
        return [blocks.nbytes(bits) for blocks in self._by_owner]


def _cut(arrays: Sequence[tuple[int, int]]) -> list[tuple[Any, Any, Any]]:
    """For each array the offsets, lengths and numbers of its blocks."""
    found, begin = [], 0
    for count, first in arrays:
        offsets = np.arange(0, count, BLOCK)
        numbers = first + np.arange(len(offsets))
        found.append((begin + offsets, np.minimum(count - offsets, BLOCK), numbers))
        begin += count
    return found


def _own_offsets(count: int, first: int, rank: int, size: int) -> range:
    """The offsets of the blocks of an array that `rank` owns."""
    return range((rank - first) % size * BLOCK, count, size * BLOCK)


def own_count(count: int, first: int, rank: int, size: int) -> int:
    """The elements of an array that `rank` owns."""
    return sum(min(BLOCK, count - offset) for offset in _own_offsets(count, first, rank, size))


def own_places(count: int, first: int, rank: int, size: int) -> NDArray[np.int64]:
    """The ascending places in an array of the elements that `rank` of `size` owns.

    Args:
        count: elements of the array.
        first: number of its first block.
        rank, size: of the owner.
    """
    offsets = np.array(_own_offsets(count, first, rank, size), np.int64)
    places = (offsets[:, None] + np.arange(BLOCK)).flatten()
    return places[places < count]
