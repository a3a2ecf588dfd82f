"""The owners of groups, for TopK with the exchange "sharded".

    select      the k largest groups among all parameters, as without owners
    all-to-all  each owner gets one packet of the selected groups in its shard
    sum         the owner adds the packets in rank order to its residual and selects the largest
    all-gather  the owners' packets; the rest and the rounding error stay in the owner's residual

A rank receives about (1 + owner_k_factor) k groups, independent of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pycomm import kernels
from pycomm.compress.packet_codec import Packets
from pycomm.compress.packet_exchange import rotation
from pycomm.compress.topk import TopK
from pycomm.kernels import GroupBatch, PacketBatch, UpdatePacket
from pycomm.kernels.groups import group_count
from pycomm.kernels.inputs import MOST_GROUP

Batch = GroupBatch | PacketBatch
Received = tuple[int, Batch]  # packets for the shard of this owner

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


class GroupShards:
    """Parameters of one dtype on one device as the shards of owners.

    Args:
        counts: elements of each parameter.
        rank, size: of this rank among the owners; a size of 1 means that there are none.
        options: TopK.
        residual: the residual as an owner, float32, flat; None: zeros.

    Attributes:
        residual: as given. `commit` replaces it.
        owner_counts: elements of each owner's shard.
    """

    def __init__(
        self,
        counts: Sequence[int],
        rank: int,
        size: int,
        options: TopK,
        residual: Tensor | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._options = options
        self._shards = shards_of(counts, size)
        self._counts = [[piece.elements for piece in shard] for shard in self._shards]
        self.residual = residual
        self._next: Tensor | None = None

    @property
    def owner_counts(self) -> list[int]:
        return [sum(counts) for counts in self._counts]

    def views(self, tensors: Sequence[Tensor], owner: int | None = None) -> list[Tensor]:
        """The pieces of flat tensors, by owner; or those of one owner."""
        shards = self._shards if owner is None else [self._shards[owner]]
        return [tensors[place][begin:end] for shard in shards for place, begin, end in shard]

    def fold(self, residual: Sequence[Tensor]) -> None:
        """Moves the residual as an owner into that of this rank, `residual`."""
        if self.residual is not None:
            mine = torch.split(self.residual, self._counts[self.rank])
            for whole, part in zip(self.views(residual, self.rank), mine, strict=True):
                whole.add_(part)
        self.residual = self._next = None

    def select(
        self,
        tensors: Sequence[Sequence[Tensor]],
        k: int,
        workspace: kernels.UpdateWorkspace,
        sent: list[UpdatePacket],
    ) -> None:
        """The update step, with one packet for each owner; together they have k groups.

        Args:
            tensors: flat theta, parameters and residual of kernels.update_step.
            k, workspace: as there.
            sent: gets the packets, one by one: if the call fails, the residual has the rest.
        """
        if self.size == 1:
            sent.append(self._step(tensors, k, workspace))
            return
        self._step(tensors, 0, workspace)
        indices, _ = kernels.topk_groups(self.views(tensors[2]), k, self._options.group)
        groups = [self._group_count(owner) for owner in range(self.size)]
        ends = np.searchsorted(indices.cpu().numpy(), np.cumsum([0, *groups]))
        for owner, own_k in enumerate(np.diff(ends).tolist()):
            sent.append(self._step([self.views(x, owner) for x in tensors], own_k))

    def choose(
        self, packets: Packets, k: int, device: torch.device, kept: Collection[int] = ()
    ) -> Tensor:
        """The packet of the largest sums in this rank's shard: its part of owner_k_factor k.

        Args:
            packets: of all ranks for this owner.
            k: groups that a rank sends.
            device: of the parameters.
            kept: positions of parameters of which nothing is sent; the residual has them as before.
        """
        counts = self._counts[self.rank]
        if not counts:
            return torch.empty(0, dtype=torch.uint8)
        total = torch.zeros(sum(counts), device=device)
        rest = torch.zeros_like(total) if self.residual is None else self.residual.clone()
        sums, scratch, rests = (
            list(torch.split(x, counts)) for x in (total, torch.zeros_like(total), rest)
        )
        kernels.decode_sum(sums, self._read(self.rank, packets, device))
        parts = [
            (own, own_rest, own_rest.clone())
            for own, own_rest, piece in zip(sums, rests, self._shards[self.rank], strict=True)
            if piece.place in kept
        ]
        for own, own_rest, _ in parts:
            own.zero_()
            own_rest.zero_()
        self._step((sums, scratch, rests), 0)
        most = min(-(-self._options.owner_k_factor * k // self.size), self._group_count(self.rank))
        _, squares = kernels.topk_groups(rests, most, self._options.group)
        chosen = self._step((sums, scratch, rests), int((squares != 0).sum()))
        for _, own_rest, before in parts:
            own_rest.copy_(before)
        self._next = rest
        packet: Tensor = chosen.packet.cpu()
        return packet

    def read(self, packets: Packets, device: torch.device) -> list[Received]:
        """The packets of the owners, or of all ranks without owners, as owner 0."""
        if self.size == 1:
            return [(0, self._read(0, packets, device))]
        message, sizes = packets
        each = zip(torch.split(message, list(sizes)), sizes, strict=True)
        return [
            (owner, self._read(owner, (part, [nbytes]), device))
            for owner, (part, nbytes) in enumerate(each)
            if self._counts[owner]  # else there are fewer groups than owners
        ]

    def _read(self, owner: int, packets: Packets, device: torch.device) -> Batch:
        message, sizes = packets
        there, counts = message.to(device), self._counts[owner]
        return kernels.read_groups(there, sizes, counts, group=self._options.group)

    def values_of(self, owner: int, packet: Tensor) -> Tensor:
        """The decoded values of a packet for an owner, on its device."""
        counts = self._counts[owner]
        if not counts:
            return torch.empty(0, device=packet.device)
        batch = kernels.decode_groups(packet, [len(packet)], counts, group=self._options.group)
        values: Tensor = batch.values
        return values

    def commit(self) -> None:
        """Stores the new residual of this owner."""
        if self._next is not None:
            self.residual, self._next = self._next, None

    def _group_count(self, owner: int) -> int:
        return group_count(self._counts[owner], self._options.group)

    def _step(
        self,
        tensors: Sequence[Sequence[Tensor]],
        k: int,
        workspace: kernels.UpdateWorkspace | None = None,
    ) -> UpdatePacket:
        if not tensors[0]:
            kinds = torch.uint8, torch.int32, torch.float32
            return UpdatePacket(*(torch.empty(0, dtype=kind) for kind in kinds))
        theta, parameters, residual = map(list, tensors)
        return kernels.update_step(
            theta,
            parameters,
            residual,
            k,
            group=self._options.group,
            value_dtype=self._options.value_dtype,
            workspace=workspace,
        )
