"""The exchange "sharded": each rank owns a shard of the coordinates and sums the packets for it.

    cut         the selected elements by owner, encoded as one compact packet for each owner
    all-to-all  int32 lengths [size, units], then packets to their owners
    sum         the owner adds the packets in rank order to its residual and selects the largest
    all-gather  the encoded selection, with indices relative to the shard; the rest and the
                quantization error stay in the residual

A rank receives about (1 + owner_k_factor) k elements, independent of the number of ranks. No
gradient is lost: sent + v + owner_residual = gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pycomm import kernels
from pycomm.compress.bucket import CompressionBucket, ReceivedPackets
from pycomm.compress.packet_codec import Packets, decode, encode, quantization_error
from pycomm.compress.packet_exchange import PacketTransport, all_gather, rotation, to_owners
from pycomm.compress.parameter_state import ParameterState
from pycomm.kernels import PacketBatch

Cut = tuple[PacketBatch, Packets]  # places and values by owner, and their packets
BLOCK = 32  # contiguous elements of one shard: selected elements cluster, shards must not


@dataclass(frozen=True)
class Sharding:
    """Assigns `count` coordinates to `size` owners. A row has one block for each rank, rotated by a
    hash of the row number, so that no stride of a matrix always has the same owner.

        row 0   block 0 -> rank 1    block 1 -> rank 2    block 2 -> rank 0     rotated by 1
        row 1   block 3 -> rank 0    block 4 -> rank 1    block 5 -> rank 2     rotated by 0

    A rank owns one block of each row. A place in its shard is row * BLOCK + place in the block,
    which ascends with the coordinate. The last row may have fewer blocks.
    """

    count: int
    size: int

    @property
    def places(self) -> int:
        """The number of places of a shard, the same for all ranks."""
        return -(-self.count // (BLOCK * self.size)) * BLOCK

    def cut(self, indices: Tensor, values: Tensor) -> PacketBatch:
        """For each owner the places in its shard, ascending, and the values."""
        block, within = indices.long() // BLOCK, indices.long() % BLOCK
        row = block // self.size
        owner = (block + rotation(row, self.size)) % self.size
        order = torch.argsort(owner, stable=True)
        lengths = torch.bincount(owner, minlength=self.size).tolist()
        places = (row * BLOCK + within).to(torch.int32)
        return PacketBatch(places[order], values[order], lengths)

    def whole(self, owner: int | Tensor, places: Tensor) -> Tensor:
        """The ascending coordinates of places in the shard of `owner`, one rank or one by place."""
        row, within = places.long() // BLOCK, places.long() % BLOCK
        block = row * self.size + (owner - rotation(row, self.size)) % self.size
        return (block * BLOCK + within).to(torch.int32)

    def joined(self, batch: PacketBatch) -> Tensor:
        """The coordinates of a batch that has one packet for each owner, in order of owners."""
        owners = torch.arange(self.size, device=batch.indices.device)
        lengths = torch.tensor(batch.lengths, device=owners.device)
        return self.whole(torch.repeat_interleave(owners, lengths), batch.indices)


class ShardedExchange:
    """The exchange of one step.

    Attributes:
        value_dtype: dtype of encoded values in both phases, as in pycomm.kernels.encode.
        owner_residual: the residual of this rank as an owner, by the first memory of a bucket:
            [places of the shard], of u's dtype. Owned by the caller; commit() writes into it.
        owner_k_factor: elements that all owners together send, in multiples of one rank's k.
    """

    def __init__(
        self,
        value_dtype: str,
        owner_residual: dict[ParameterState, Tensor],
        owner_k_factor: int = 1,
    ) -> None:
        self.value_dtype, self.owner_residual, self.owner_k_factor = (
            value_dtype,
            owner_residual,
            owner_k_factor,
        )
        self._next: dict[ParameterState, Tensor] = {}

    def exchange(
        self,
        units: Sequence[CompressionBucket],
        transport: PacketTransport,
        unused: Collection[ParameterState] = (),
    ) -> tuple[list[ReceivedPackets], int]:
        """Collective. The packets received for each bucket, and the bytes that this rank sent."""
        self._next = {}
        shares = [Sharding(unit.count, transport.size) for unit in units]
        cuts = self._cut(units, shares)
        received, given = to_owners([packets for _, packets in cuts], transport)
        chosen = [
            self._choose(unit, share, packets, _places_of(unused, unit, share, transport.rank))
            for unit, share, packets in zip(units, shares, received, strict=True)
        ]
        gathered, sent = all_gather(chosen, transport)
        found = []
        for unit, share, cut, packets in zip(units, shares, cuts, gathered, strict=True):
            sums = decode(packets, share.places, unit.values.device)
            decoded = sums._replace(indices=share.joined(sums))
            found.append(ReceivedPackets(unit, decoded, _error_to_owners(unit, share, cut)))
        return found, given + sent

    def commit(self) -> None:
        """Stores the new owner residual."""
        self.owner_residual.update(self._next)
        self._next = {}

    def quantization_errors(self, units: Sequence[CompressionBucket], size: int) -> list[Tensor]:
        """The quantization error of the packets to owners, for each bucket."""
        shares = [Sharding(unit.count, size) for unit in units]
        cuts = self._cut(units, shares)
        return [_error_to_owners(*one) for one in zip(units, shares, cuts, strict=True)]

    def _cut(self, units: Sequence[CompressionBucket], shares: Sequence[Sharding]) -> list[Cut]:
        """The elements of each bucket by owner, with their packets."""
        cuts = []
        for unit, share in zip(units, shares, strict=True):
            cut = share.cut(unit.indices, unit.values)
            cuts.append((cut, encode(cut, share.places, self.value_dtype)))
        return cuts

    def _choose(
        self, unit: CompressionBucket, share: Sharding, packets: Packets, kept_back: Tensor
    ) -> Tensor:
        """The packet of the largest sums in this owner's shard: its part of owner_k_factor k. The
        rest becomes the new owner residual, which stays as it is at the places `kept_back`."""
        first, device = unit.memories[0], unit.values.device
        total = torch.zeros(share.places, dtype=unit.values.dtype, device=device)
        kernels.decode_sum(total, decode(packets, share.places, device))
        before = self.owner_residual.get(first)
        if before is not None:
            total += before
        total[kept_back] = 0
        k = min(-(-self.owner_k_factor * len(unit.values) // share.size), share.places)
        places, values = kernels.topk(total, k)
        nonzero = values != 0
        kept = PacketBatch(places[nonzero], values[nonzero], [int(nonzero.sum())])
        packet = encode(kept, share.places, self.value_dtype)
        decoded = decode(packet, share.places, device)
        total[kept.indices] = quantization_error(kept.values, decoded.values)
        if before is not None:
            total[kept_back] = before[kept_back]
        self._next[first] = total
        return packet[0]


def _places_of(
    unused: Collection[ParameterState], unit: CompressionBucket, share: Sharding, rank: int
) -> Tensor:
    """The places of these parameters in the shard of an owner."""
    found, offset = [torch.empty(0, dtype=torch.int64, device=unit.values.device)], 0
    for memory in unit.memories:
        if memory in unused:
            whole = share.whole(rank, torch.arange(share.places, device=unit.values.device))
            found.append(((whole >= offset) & (whole < offset + memory.count)).nonzero().flatten())
        offset += memory.count
    return torch.cat(found)


def _error_to_owners(unit: CompressionBucket, share: Sharding, cut: Cut) -> Tensor:
    """The quantization error of this rank's packets to owners, in the order of its values."""
    batch, packets = cut
    decoded = decode(packets, share.places, batch.values.device)
    error = quantization_error(batch.values, decoded.values).to(unit.values.dtype)
    return error[torch.argsort(share.joined(batch))]
