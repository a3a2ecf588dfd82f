"""A bucket: parameters that are compressed together, and the elements that this rank selected.

Received packets become gradients or an update; the quantization error returns to v.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pycomm import kernels
from pycomm.compress.parameter_state import ParameterState, flat_view
from pycomm.kernels import PacketBatch

Pair = tuple[Tensor, Tensor]  # indices int32 [k], ascending, and values [k]


@dataclass(eq=False)
class CompressionBucket:
    """Indices count through all memories, concatenated; gradients are flat, in the same order."""

    memories: list[ParameterState]
    gradients: list[Tensor]
    indices: Tensor
    values: Tensor

    @property
    def count(self) -> int:
        """Number of elements of all memories."""
        return sum(memory.count for memory in self.memories)

    def sent(self) -> Iterator[tuple[ParameterState, Tensor]]:
        """For each memory the indices within it that this rank sent, ascending."""
        for memory, (indices, _) in self._cut(self.indices, self.values):
            yield memory, indices

    def restore_error(self, error: Tensor) -> None:
        """Adds the quantization error [k] to v, which is 0 at the selected elements."""
        for memory, (indices, values) in self._cut(self.indices, error):
            assert memory.v is not None
            memory.v[indices] += values

    def decode(self, pairs: Sequence[Pair] | PacketBatch, factor: float) -> None:
        """Sets gradients to factor * the sum of the packets, added in their order."""
        kernels.decode_sum(self.gradients, pairs, factor)

    def update(self, pairs: Sequence[Pair] | PacketBatch, factor: float) -> None:
        """The optimizer's step on sent elements: parameters -= learning rate * factor * the sum."""
        for rate, first, last, offset, count in _by_rate(self.memories):
            flat = [flat_view(memory.parameter) for memory in self.memories[first:last]]
            cut = pairs
            if last - first < len(self.memories):
                cut = [elements_between(*pair, offset, offset + count) for pair in _each(pairs)]
            kernels.decode_update(flat, cut, rate, factor)

    def _cut(self, indices: Tensor, values: Tensor) -> Iterator[tuple[ParameterState, Pair]]:
        """For each memory its indices, counted from its first element, and values."""
        offset = 0
        for memory in self.memories:
            yield memory, elements_between(indices, values, offset, offset + memory.count)
            offset += memory.count


@dataclass(frozen=True)
class ReceivedPackets:
    """A bucket and the packets received for it, to be added in this order.

    Attributes:
        error: [k], the quantization error of this rank's values; None: no error.
    """

    unit: CompressionBucket
    pairs: Sequence[Pair] | PacketBatch
    error: Tensor | None = None

    def silence(self, unused: Collection[ParameterState]) -> None:
        """Sets the values received for these parameters to 0."""
        offset = 0
        for memory in self.unit.memories:
            for indices, values in _each(self.pairs) if memory in unused else ():
                elements_between(indices, values, offset, offset + memory.count)[1].zero_()
            offset += memory.count


def _each(pairs: Sequence[Pair] | PacketBatch) -> Iterable[Pair]:
    if not isinstance(pairs, PacketBatch):
        return pairs
    parts = (torch.split(part, list(pairs.lengths)) for part in (pairs.indices, pairs.values))
    return zip(*parts, strict=True)


def elements_between(indices: Tensor, values: Tensor, start: int, stop: int) -> Pair:
    """The elements with start <= index < stop; indices count from start."""
    ends = torch.tensor([start, stop], dtype=indices.dtype, device=indices.device)
    first, last = torch.searchsorted(indices, ends).tolist()
    return indices[first:last] - start, values[first:last]


def _by_rate(memories: Sequence[ParameterState]) -> Iterator[tuple[float, int, int, int, int]]:
    """Runs of memories with one learning rate: (rate, first, last, offset, elements)."""
    first = offset = 0
    for rate, run in itertools.groupby(memories, lambda memory: float(memory.group["lr"])):
        counts = [memory.count for memory in run]
        yield rate, first, first + len(counts), offset, sum(counts)
        first, offset = first + len(counts), offset + sum(counts)
