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
from pycomm.compress.packet_codec import Packets, decode, encode
from pycomm.compress.packet_exchange import (
    AllGatherExchange,
    PacketTransport,
    all_gather,
    rotation,
    to_owners,
)
from pycomm.compress.parameter_state import ParameterState
from pycomm.compress.residual import Entry, Transaction
from pycomm.kernels import PacketBatch

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


class ShardedExchange(AllGatherExchange):
    """The exchange of one step.

    Attributes:
        value_dtype: of encoded values in both phases.
        owned: the residual of this rank as an owner, by the key of a bucket: [places of the
            shard], of u's dtype. Owned by the caller.
        owner_k_factor: elements that all owners together send, in multiples of one rank's k.
    """

    def __init__(self, value_dtype: str, owned: dict[str, Tensor], owner_k_factor: int = 1) -> None:
        super().__init__(value_dtype)
        self.owned, self.owner_k_factor = owned, owner_k_factor

    def exchange(
        self,
        units: Sequence[CompressionBucket],
        transport: PacketTransport,
        transaction: Transaction,
        unused: Collection[ParameterState] = (),
    ) -> tuple[list[ReceivedPackets], int]:
        shares = [Sharding(unit.count, transport.size) for unit in units]
        both = list(zip(units, shares, strict=True))
        received, given = to_owners([self._cut(unit, share) for unit, share in both], transport)
        chosen = []
        for (unit, share), packets in zip(both, received, strict=True):
            kept_back = _places_of(unused, unit, share, transport.rank)
            packet, rest = self._choose(unit, share, packets, kept_back)
            chosen.append(packet)
            transaction.record(Entry(self.owned, unit.key, rest))
        gathered, sent = all_gather(chosen, transport)
        found = []
        for (unit, share), packets in zip(both, gathered, strict=True):
            sums = decode(packets, share.places, unit.values.device)
            found.append(ReceivedPackets(unit, sums._replace(indices=share.joined(sums))))
        return found, given + sent

    def _cut(self, unit: CompressionBucket, share: Sharding) -> Packets:
        """The packets of a bucket for each owner, whose quantization error returns to v."""
        batch = share.cut(unit.indices, unit.values)
        packets = encode(batch, share.places, self.value_dtype)
        decoded = decode(packets, share.places, batch.values.device).values
        unit.restore_error(decoded[torch.argsort(share.joined(batch))])
        return packets

    def _choose(
        self, unit: CompressionBucket, share: Sharding, packets: Packets, kept_back: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The packet of the largest sums in this owner's shard: its part of owner_k_factor k. The
        rest is the new residual of the owner, as before at the places `kept_back`."""
        device = unit.values.device
        total = torch.zeros(share.places, dtype=unit.values.dtype, device=device)
        kernels.decode_sum(total, decode(packets, share.places, device))
        before = self.owned.get(unit.key)
        if before is not None:
            total += before
        total[kept_back] = 0
        k = min(-(-self.owner_k_factor * len(unit.values) // share.size), share.places)
        places, values = kernels.topk(total, k)
        nonzero = values != 0
        kept = PacketBatch(places[nonzero], values[nonzero], [int(nonzero.sum())])
        packet = encode(kept, share.places, self.value_dtype)
        error = kept.values - decode(packet, share.places, device).values
        total[kept.indices] = torch.where(error.isfinite(), error, 0).to(total.dtype)
        if before is not None:
            total[kept_back] = before[kept_back]
        return packet[0], total


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
