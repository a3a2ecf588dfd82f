"""What is summed by itself: parameters laid end to end, and the elements that this rank takes out.

What has arrived from the ranks becomes gradients or an update, what coding has lost goes back to
v. How it travels is packet.py's and packet_exchange.py's, when is transaction.py's; both use this
file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pycomm import kernels
from pycomm.compress.parameter_state import ParameterState, line
from pycomm.kernels import PacketBatch

__all__ = ["Arrived", "CompressionBucket", "Pair", "between"]

Pair = tuple[Tensor, Tensor]  # indices int32 [k], ascending, and their values [k]


@dataclass(eq=False)
class CompressionBucket:
    """Indices count through all of its memories; the gradients are lines in the same order."""

    memories: list[ParameterState]
    gradients: list[Tensor]
    indices: Tensor
    values: Tensor

    @property
    def count(self) -> int:
        """Elements, of which some were taken out."""
        return sum(memory.count for memory in self.memories)

    def sent(self) -> Iterator[tuple[ParameterState, Tensor]]:
        """For each memory the places within it that this rank has sent, ascending."""
        for memory, (indices, _) in self._cut(self.indices, self.values):
            yield memory, indices

    def give_back(self, lost: Tensor) -> None:
        """v, which is empty where something was taken out, owes there what was `lost` [k] of it."""
        for memory, (indices, values) in self._cut(self.indices, lost):
            assert memory.v is not None
            memory.v[indices] += values

    def decode(self, pairs: Sequence[Pair] | PacketBatch, factor: float) -> None:
        """Gradients become factor * the sum of the ranks' elements, in their order."""
        kernels.decode_sum(self.gradients, pairs, factor)

    def update(self, pairs: Sequence[Pair] | PacketBatch, factor: float) -> None:
        """The optimizer's step: parameters -= rate * factor * the sum, touched where it is sent."""
        for rate, first, last, offset, count in _by_rate(self.memories):
            lines = [line(memory.parameter) for memory in self.memories[first:last]]
            cut = pairs
            if last - first < len(self.memories):
                cut = [between(*pair, offset, offset + count) for pair in _each(pairs)]
            kernels.decode_update(lines, cut, rate, factor)

    def _cut(self, indices: Tensor, values: Tensor) -> Iterator[tuple[ParameterState, Pair]]:
        """What of these is of each memory, counted from its beginning."""
        offset = 0
        for memory in self.memories:
            yield memory, between(indices, values, offset, offset + memory.count)
            offset += memory.count


@dataclass(frozen=True)
class Arrived:
    """A unit and what has come for it, to be added in this order.

    Attributes:
        lost: [k], what this rank's values have lost on the way; None: nothing.
    """

    unit: CompressionBucket
    pairs: Sequence[Pair] | PacketBatch
    lost: Tensor | None = None


def _each(pairs: Sequence[Pair] | PacketBatch) -> Iterable[Pair]:
    if not isinstance(pairs, PacketBatch):
        return pairs
    parts = (torch.split(part, list(pairs.lengths)) for part in (pairs.indices, pairs.values))
    return zip(*parts, strict=True)


def between(indices: Tensor, values: Tensor, start: int, stop: int) -> Pair:
    """What there is at start <= index < stop, counted from start."""
    ends = torch.tensor([start, stop], dtype=indices.dtype, device=indices.device)
    first, last = torch.searchsorted(indices, ends).tolist()
    return indices[first:last] - start, values[first:last]


def _by_rate(memories: Sequence[ParameterState]) -> Iterator[tuple[float, int, int, int, int]]:
    """Runs of memories with one learning rate: the rate, which, their offset and elements."""
    first = offset = 0
    for rate, run in itertools.groupby(memories, lambda memory: float(memory.group["lr"])):
        counts = [memory.count for memory in run]
        yield rate, first, first + len(counts), offset, sum(counts)
        first, offset = first + len(counts), offset + sum(counts)
