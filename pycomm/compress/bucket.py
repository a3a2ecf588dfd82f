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
from pycomm.compress.residual import cut
from pycomm.kernels import PacketBatch

Pair = tuple[Tensor, Tensor]  # indices int32 [k], ascending, and values [k]


@dataclass(eq=False)
class CompressionBucket:
    """Indices count through all memories, concatenated; gradients are flat, in the same order.

    Attributes:
        key: of the owner's part of the residual.
    """

    memories: list[ParameterState]
    gradients: list[Tensor]
    indices: Tensor
    values: Tensor
    key: str = ""

    @property
    def count(self) -> int:
        """Number of elements of all memories."""
        return sum(memory.count for memory in self.memories)

    def restore_error(self, decoded: Tensor) -> None:
        """Adds the quantization error of the values, which became `decoded` [k], to v, where it is
        0; it is 0 where it would be NaN or infinite."""
        error = self.values - decoded
        error = torch.where(error.isfinite(), error, 0).to(self.values.dtype)
        counts = [memory.count for memory in self.memories]
        for memory, (places, part) in zip(
            self.memories, cut(counts, self.indices, error), strict=True
        ):
            assert memory.v is not None
            memory.v[places] += part

    def decode(self, pairs: Sequence[Pair] | PacketBatch, factor: float) -> None:
        """Sets gradients to factor * the sum of the packets, added in their order."""
        kernels.decode_sum(self.gradients, pairs, factor)

    def update(self, pairs: Sequence[Pair] | PacketBatch, factor: float) -> None:
        """The optimizer's step on sent elements: parameters -= learning rate * factor * the sum."""
        runs = list(_by_rate(self.memories))
        counts = [sum(memory.count for memory in run) for _, run in runs]
        parts = [pairs]
        if len(runs) > 1:
            each = [list(cut(counts, *pair)) for pair in _each(pairs)]
            parts = [list(part) for part in zip(*each, strict=True)]
        for (rate, run), mine in zip(runs, parts, strict=True):
            flat = [flat_view(memory.parameter) for memory in run]
            kernels.decode_update(flat, mine, rate, factor)


@dataclass(frozen=True)
class ReceivedPackets:
    """A bucket and the packets received for it, to be added in this order."""

    unit: CompressionBucket
    pairs: Sequence[Pair] | PacketBatch

    def silence(self, unused: Collection[ParameterState]) -> None:
        """Sets the values received for these parameters to 0."""
        memories = self.unit.memories
        for pair in _each(self.pairs):
            parts = cut([memory.count for memory in memories], *pair)
            for memory, (_, values) in zip(memories, parts, strict=True):
                if memory in unused:
                    values.zero_()


def _each(pairs: Sequence[Pair] | PacketBatch) -> Iterable[Pair]:
    if not isinstance(pairs, PacketBatch):
        return pairs
    parts = (torch.split(part, list(pairs.lengths)) for part in (pairs.indices, pairs.values))
    return zip(*parts, strict=True)


def _by_rate(memories: Sequence[ParameterState]) -> Iterator[tuple[float, list[ParameterState]]]:
    """Runs of memories with one learning rate."""
    for rate, run in itertools.groupby(memories, lambda memory: float(memory.group["lr"])):
        yield rate, list(run)
