"""A bucket: parameters that are compressed together, and the elements that this rank selected.

Received packets become gradients or an update; quantization errors return to v.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycomm import kernels
from pycomm.compress.parameter_state import ParameterState, flat_view
from pycomm.compress.residual import cut
from pycomm.kernels import PacketBatch
from pycomm.kernels.inputs import MOST_ELEMENTS

Pair = tuple[Tensor, Tensor]  # indices int32 [k], ascending, and values [k]


@dataclass(eq=False)
class CompressionBucket:
    """Indices count through all memories, concatenated; gradients are flat, in the same order.

    A coded packet has the elements of one array: a parameter, or all together if there is one k.

    Attributes:
        k: number of selected elements of each parameter, or of all together.
    """

    memories: list[ParameterState]
    gradients: list[Tensor]
    indices: Tensor
    values: Tensor
    k: int | list[int]

    @property
    def lengths(self) -> list[int]:
        """Selected elements of each array."""
        return [self.k] if isinstance(self.k, int) else self.k

    @property
    def counts(self) -> list[int]:
        """Elements of each array."""
        each = [memory.count for memory in self.memories]
        return [sum(each)] if isinstance(self.k, int) else each

    @property
    def keys(self) -> list[str]:
        """Of the owner's part of the residual, for each array."""
        return [""] if isinstance(self.k, int) else [memory.name for memory in self.memories]

    def without(self, unused: set[ParameterState]) -> list[CompressionBucket]:
        """What is left without the arrays that have only these parameters."""
        if unused.isdisjoint(self.memories):
            return [self]
        if isinstance(self.k, int):
            return [] if unused.issuperset(self.memories) else [self]
        counts = [memory.count for memory in self.memories]
        parts = cut(counts, self.indices, self.values)
        each = zip(self.memories, self.gradients, parts, self.k, strict=True)
        return [
            CompressionBucket([memory], [gradient], *part, [k])
            for memory, gradient, part, k in each
            if memory not in unused
        ]

    def restore_errors(self, errors: Tensor) -> None:
        """Adds the quantization errors of the values [k] to v, where it is 0; they count as 0 where
        they are not finite."""
        v = [memory.v for memory in self.memories]
        kernels.decode_update(v, [(self.indices, finite(errors))], -1.0)

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


def joined(buckets: Iterable[CompressionBucket]) -> list[CompressionBucket]:
    """Joins the buckets that have the same dtypes and device, as far as int32 indices reach."""
    found: list[list[CompressionBucket]] = []
    last: dict[Any, list[CompressionBucket]] = {}
    for bucket in buckets:
        kind = bucket.values.dtype, bucket.gradients[0].dtype, bucket.values.device
        rows = last.get(kind, [])
        alone = isinstance(bucket.k, int) or not rows
        if alone or sum(map(_count, rows)) + _count(bucket) > MOST_ELEMENTS:
            last[kind] = rows = []
            found.append(rows)
        rows.append(bucket)
    return [_join(rows) for rows in found]


def _count(bucket: CompressionBucket) -> int:
    return sum(bucket.counts)


def _join(buckets: list[CompressionBucket]) -> CompressionBucket:
    if len(buckets) == 1:
        return buckets[0]
    firsts = itertools.accumulate(map(_count, buckets), initial=0)
    return CompressionBucket(
        [memory for bucket in buckets for memory in bucket.memories],
        [gradient for bucket in buckets for gradient in bucket.gradients],
        torch.cat([b.indices + first for b, first in zip(buckets, firsts, strict=False)]),
        torch.cat([bucket.values for bucket in buckets]),
        [k for bucket in buckets for k in bucket.lengths],
    )


def finite(errors: Tensor) -> Tensor:
    """The errors, and 0 in place of NaN and infinity."""
    return torch.where(errors.isfinite(), errors, 0).to(errors.dtype)


@dataclass(frozen=True)
class ReceivedPackets:
    """A bucket and the packets received for it, to be added in this order."""

    bucket: CompressionBucket
    pairs: Sequence[Pair] | PacketBatch

    def silence(self, unused: Collection[ParameterState]) -> None:
        """Sets the values received for these parameters to 0."""
        memories = self.bucket.memories
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
