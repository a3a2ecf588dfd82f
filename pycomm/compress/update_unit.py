"""Parameters whose largest groups of updates TopK selects together, with or without owners:

    select      the k largest groups among all parameters
    all-to-all  each owner gets one packet of the selected groups in its shard
    sum         the owner adds the packets in rank order to its residual and selects the largest
    all-gather  the owners' packets; the rest and the rounding error stay in the owner's residual

A rank receives about (1 + owner_k_factor) k groups, independent of the number of ranks. Without
owners the packets of all ranks are gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pycomm import kernels
from pycomm.compress.packet_exchange import Packets, rotation
from pycomm.compress.parameter_state import flat_view
from pycomm.compress.residual import Elements, Entry, Transaction
from pycomm.compress.topk import TopK
from pycomm.compress.updates import commit_rounded
from pycomm.kernels import GroupBatch, PacketBatch
from pycomm.kernels.groups import group_count
from pycomm.kernels.inputs import MOST_GROUP

Batch = GroupBatch | PacketBatch

# Elements; a piece is an array of a kernel call, and has whole groups of any size.
LEAST_PIECE, MOST_PIECE = MOST_GROUP, 1 << 16
ROWS = 8  # pieces of a shard, if the model is large enough: large groups are neighbours


class Piece(NamedTuple):
    """Contiguous elements of a parameter, by its position."""

    place: int
    begin: int
    end: int

    @property
    def elements(self) -> int:
        return self.end - self.begin


def shards_of(counts: Sequence[int], size: int) -> list[list[Piece]]:
    """The pieces of each owner's shard, ascending. Those of a row have one owner each, rotated by a
    hash of the row, so that no stride always has the same owner. A piece has whole groups, as the
    parameter has them; an owner can have none.

    Args:
        counts: elements of each parameter.
        size: number of owners; one: it owns whole parameters.
    """
    if size == 1:
        return [[Piece(place, 0, count) for place, count in enumerate(counts)]]
    share = sum(counts) // (size * ROWS)
    step = max(LEAST_PIECE, min(MOST_PIECE, share) // LEAST_PIECE * LEAST_PIECE)
    cut = [
        Piece(place, begin, min(begin + step, count))
        for place, count in enumerate(counts)
        for begin in range(0, count, step)
    ]
    shards: list[list[Piece]] = [[] for _ in range(size)]
    for number, piece in enumerate(cut):
        shards[(number + rotation(number // size, size)) % size].append(piece)
    return shards


def places_of(counts: Sequence[int], rank: int, size: int) -> Tensor:
    """The coordinates that an owner has of these parameters, which are concatenated."""
    begins = np.cumsum([0, *counts])
    shard = shards_of(counts, size)[rank]
    parts = [torch.arange(begin, end) + int(begins[place]) for place, begin, end in shard]
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


class UpdateUnit:
    """Parameters of one dtype on one device.

    Args:
        options: of the compression.
        places: positions among the model's parameters.
        parameters, snapshot: the parameters, and the shared ones.

    Attributes:
        key: of the owner's part of the residual.
        places: as given.
        theta: flat views of the shared parameters.
        residual: float32, as theta.
        counts: elements of each parameter.
        device: of the parameters.
        k: number of groups that a rank sends.
        rank, size: of this rank among the owners; a size of 1 means that there are none.

    Raises:
        InvalidArgument: the parameters are too few for the ratio.
    """

    def __init__(
        self,
        options: TopK,
        places: Sequence[int],
        parameters: Sequence[Tensor],
        snapshot: Sequence[Tensor],
    ) -> None:
        self._options = options
        self.key = f"with {places[0]}"
        self.places = list(places)
        self._own = list(parameters)
        self.theta = [flat_view(x) for x in snapshot]
        self.device = self.theta[0].device
        self.residual = [torch.zeros(x.numel(), device=self.device) for x in self.theta]
        self.counts = [x.numel() for x in self.theta]
        self.k = options.groups(self.counts)
        self.have_owners(0, 1)

    def have_owners(self, rank: int, size: int) -> None:
        """Has `size` owners from now on, or none if that is 1."""
        self.rank, self.size = rank, size
        self._shards = _shards(tuple(self.counts), size)
        counts = [[piece.elements for piece in shard] for shard in self._shards]
        self._own_counts = counts[rank]
        self._groups = [group_count(each, self._options.group) for each in counts]

    @property
    def _parameters(self) -> list[Tensor]:
        """Flat views of the parameters, whose memory the program may have replaced."""
        return [flat_view(x) for x in self._own]

    def _views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The pieces of flat tensors, by owner."""
        if self.size == 1:
            return list(tensors)
        return [tensors[place][begin:end] for shard in self._shards for place, begin, end in shard]

    def select(self, transaction: Transaction) -> Packets:
        """Adds the update to the residual and takes the packets for the owners from it; together
        they have k groups. The parameters are the shared ones then."""
        theta, own, rest = (self._views(x) for x in (self.theta, self._parameters, self.residual))
        indices, _ = kernels.update_step(theta, own, rest, self.k, group=self._options.group)
        packets, values = self._taken(rest, indices, [len(shard) for shard in self._shards])
        transaction.record(Elements([rest], indices, [values], self._options.group))
        return packets

    def choose(
        self,
        packets: Packets,
        owned: dict[str, Tensor],
        unused: Collection[int],
        transaction: Transaction,
    ) -> Packets:
        """As an owner, the packet of the largest sums: its part of owner_k_factor k.

        Args:
            packets: of all ranks for this owner.
            owned: what this rank has as an owner, by key; changed.
            unused: places of which nothing is sent; `owned` has them as before.
            transaction: records the change.
        """
        counts = self._own_counts
        before, total = owned.get(self.key), torch.zeros(sum(counts), device=self.device)
        rest = torch.zeros_like(total) if before is None else before.clone()
        if not counts:
            transaction.record(Entry(owned, self.key, rest))
            return Packets(torch.empty(0, dtype=torch.uint8, device=self.device), [0], [0])
        sums, scratch, rests = (
            list(torch.split(x, counts)) for x in (total, torch.zeros_like(total), rest)
        )
        kernels.decode_sum(sums, self._read(packets, [self._groups[self.rank]]))
        parts = [
            (own, own_rest, own_rest.clone())
            for own, own_rest, piece in zip(sums, rests, self._shards[self.rank], strict=True)
            if self.places[piece.place] in unused
        ]
        for own, own_rest, _ in parts:
            own.zero_()
            own_rest.zero_()
        factor, group = self._options.owner_k_factor, self._options.group
        most = min(-(-factor * self.k // self.size), self._groups[self.rank])
        indices, squares = kernels.update_step(sums, scratch, rests, most, group=group)
        chosen, _ = self._taken(rests, indices[squares != 0])
        for _, own_rest, old in parts:
            own_rest.copy_(old)
        transaction.record(Entry(owned, self.key, rest))
        return chosen

    def read(self, packets: Packets) -> Batch:
        """The packets of the owners, or of all ranks without owners."""
        batch = self._read(packets, self._groups)
        if self.size > 1 and isinstance(batch, PacketBatch):  # the owners' groups ascend
            return batch._replace(lengths=[sum(batch.lengths)])
        return batch

    def commit(self, received: Batch, factors: Sequence[float], holders: int) -> None:
        """theta * factor - the received sum / holders, in theta and the parameters."""
        if self.theta[0].dtype == torch.float32:
            for x, y, factor in zip(self.theta, self._parameters, factors, strict=True):
                if factor != 1:
                    x.mul_(factor)
                    y.copy_(x)
            for tensors in (self.theta, self._parameters):
                kernels.decode_update(self._views(tensors), received, 1.0, 1.0 / holders)
        else:
            means = [torch.empty_like(residual) for residual in self.residual]
            self.decode(means, received, holders)
            rows = (self.theta, self._parameters, self.residual, means, factors)
            for row in zip(*rows, strict=True):
                commit_rounded(*row)

    def decode(self, means: Sequence[Tensor], received: Batch, holders: int) -> None:
        """Writes the received sum / holders into flat tensors."""
        kernels.decode_sum(self._views(means), received, 1.0 / holders)

    def _read(self, packets: Packets, counts: Sequence[int]) -> Batch:
        message, group = packets.message.to(self.device), self._options.group
        return kernels.read_groups(message, packets.sizes, packets.lengths, counts, group=group)

    def _taken(
        self, tensors: Sequence[Tensor], indices: Tensor, split: Sequence[int] | None = None
    ) -> tuple[Packets, Tensor]:
        """The packets of these groups, which the tensors have no more; and what was there."""
        taken = kernels.encode_groups(
            list(tensors),
            indices,
            group=self._options.group,
            value_dtype=self._options.value_dtype,
            split=split,
        )
        message = torch.cat(taken.packets)
        return Packets(message, [len(x) for x in taken.packets], taken.lengths), taken.values


@functools.lru_cache(64)
def _shards(counts: tuple[int, ...], size: int) -> list[list[Piece]]:
    return shards_of(counts, size)
