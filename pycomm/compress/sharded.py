"""The exchange "sharded": each rank owns a share of the coordinates, and sums what all send of it.

    cut      the elements that a rank takes out, by owner; each owner's in a compact packet of its
             own
    to all   packets to their owners, one message for each pair of ranks
    sum      the owner adds in rank order to what it still owes, and chooses the largest
    gather   its choice, coded, goes to all; the rest, and what rounding lost, it owes

A rank receives (1 + owner_k_factor) k elements or so, whatever the number of ranks. What owners owe
is part of P3: sent + v + owner_residual = gradients. Called by transaction.py; dgc.py makes a
ShardedExchange for each step, and keeps the owner residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pycomm import kernels
from pycomm.compress.bucket import Arrived, CompressionBucket
from pycomm.compress.packet_exchange import (
    Packets,
    PacketTransport,
    all_gather,
    decode,
    encode,
    quantization_error,
    transpose_packets,
)
from pycomm.compress.parameter_state import ParameterState
from pycomm.kernels import PacketBatch

__all__ = ["ShardedExchange", "Sharding"]

Cut = tuple[PacketBatch, Packets]  # places and values by owner, and the packets of them
BLOCK = 32  # elements that lie together in one share: a kept set clusters, and a share must not


@dataclass(frozen=True)
class Sharding:
    """Who owns which of `count` coordinates, of `size` ranks: blocks in rows of one for each rank,
    and each row turned by a hash of its number, so that no stride of a matrix meets one owner.

        row 0   block 0 -> rank 1    block 1 -> rank 2    block 2 -> rank 0     turned by 1
        row 1   block 3 -> rank 0    block 4 -> rank 1    block 5 -> rank 2     turned by 0

    A rank has one block of each row, so a place in its share is row * BLOCK + place in the block,
    which ascends with the coordinate. The last row may lack blocks; nothing is ever there.
    """

    count: int
    size: int

    @property
    def places(self) -> int:
        """Of a share: the same for all ranks."""
        return -(-self.count // (BLOCK * self.size)) * BLOCK

    def cut(self, indices: Tensor, values: Tensor) -> PacketBatch:
        """By owner: the places in its share, ascending, and the values."""
        block, within = indices.long() // BLOCK, indices.long() % BLOCK
        row = block // self.size
        owner = (block + self._turn(row)) % self.size
        order = torch.argsort(owner, stable=True)
        lengths = torch.bincount(owner, minlength=self.size).tolist()
        places = (row * BLOCK + within).to(torch.int32)
        return PacketBatch(places[order], values[order], lengths)

    def whole(self, owner: int | Tensor, places: Tensor) -> Tensor:
        """The coordinates, ascending, of places in the share of `owner`, of all or of each."""
        row, within = places.long() // BLOCK, places.long() % BLOCK
        block = row * self.size + (owner - self._turn(row)) % self.size
        return (block * BLOCK + within).to(torch.int32)

    def joined(self, batch: PacketBatch) -> Tensor:
        """The coordinates of what is of each owner, in order of owners."""
        owners = torch.arange(self.size, device=batch.indices.device)
        lengths = torch.tensor(batch.lengths, device=owners.device)
        return self.whole(torch.repeat_interleave(owners, lengths), batch.indices)

    def _turn(self, row: Tensor) -> Tensor:
        return ((row * 0x9E3779B1 & 0xFFFFFFFF) >> 16) % self.size


class ShardedExchange:
    """The exchange of one step.

    Attributes:
        value_dtype: of values on both ways, as pycomm.kernels.encode has it.
        owner_residual: what this rank owes as an owner, by the first memory of a unit: [places of
            the share], of u's dtype. The caller's: commit() writes into it.
        owner_k_factor: what all owners together send on, in multiples of what one rank sends.
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
        self, units: Sequence[CompressionBucket], transport: PacketTransport
    ) -> tuple[list[Arrived], int]:
        """Collective. What has arrived for each unit, and the bytes that this rank has given."""
        self._next = {}
        shares = [Sharding(unit.count, transport.size) for unit in units]
        cuts = self._cut(units, shares)
        came, given = _to_owners([packets for _, packets in cuts], transport)
        chosen = [
            self._choose(unit, share, packets)
            for unit, share, packets in zip(units, shares, came, strict=True)
        ]
        everyone, sent = all_gather(chosen, transport)
        found = []
        for unit, share, cut, packets in zip(units, shares, cuts, everyone, strict=True):
            told = decode(packets, share.places, unit.values.device)
            arrived = told._replace(indices=share.joined(told))
            found.append(Arrived(unit, arrived, _lost(unit, share, cut)))
        return found, given + sent

    def commit(self) -> None:
        """Takes over the new owner residual."""
        self.owner_residual.update(self._next)
        self._next = {}

    def lost(self, units: Sequence[CompressionBucket], size: int) -> list[Tensor]:
        """On the way to owners."""
        shares = [Sharding(unit.count, size) for unit in units]
        cuts = self._cut(units, shares)
        return [_lost(*one) for one in zip(units, shares, cuts, strict=True)]

    def _cut(self, units: Sequence[CompressionBucket], shares: Sequence[Sharding]) -> list[Cut]:
        """Of each unit, by owner."""
        cuts = []
        for unit, share in zip(units, shares, strict=True):
            cut = share.cut(unit.indices, unit.values)
            cuts.append((cut, encode(cut, share.places, self.value_dtype)))
        return cuts

    def _choose(self, unit: CompressionBucket, share: Sharding, packets: Packets) -> Tensor:
        """The largest of what there is for this owner, its part of owner_k_factor times what one
        rank sends; it owes the rest. A packet."""
        first, device = unit.memories[0], unit.values.device
        total = torch.zeros(share.places, dtype=unit.values.dtype, device=device)
        kernels.decode_sum(total, decode(packets, share.places, device))
        if first in self.owner_residual:
            total += self.owner_residual[first]
        k = min(-(-self.owner_k_factor * len(unit.values) // share.size), share.places)
        places, values = kernels.topk(total, k)
        some = values != 0
        kept = PacketBatch(places[some], values[some], [int(some.sum())])
        packet = encode(kept, share.places, self.value_dtype)
        arrived = decode(packet, share.places, device)
        total[kept.indices] = quantization_error(kept.values, arrived.values)
        self._next[first] = total
        return packet[0]


def _lost(unit: CompressionBucket, share: Sharding, cut: Cut) -> Tensor:
    """What this rank's values have lost on the way to their owners, in their order."""
    batch, packets = cut
    arrived = decode(packets, share.places, batch.values.device)
    lost = quantization_error(batch.values, arrived.values).to(unit.values.dtype)
    return lost[torch.argsort(share.joined(batch))]


def _to_owners(packets: Sequence[Packets], transport: PacketTransport) -> tuple[list[Packets], int]:
    """Collective. Of each unit those for each owner go there: of each unit those of all ranks for
    this rank, in rank order; and the bytes that went to others."""
    mine = torch.tensor([sizes for _, sizes in packets], dtype=torch.int32)
    give = mine.T.contiguous()  # [size, units]
    take = torch.empty_like(give)
    transport.all_to_all(give, take).wait()
    by_owner = transpose_packets(torch.cat([message for message, _ in packets]), mine)
    message = torch.cat([part for part, _ in by_owner])
    totals = [lengths.sum(1).tolist() for lengths in (give, take)]
    came = message.new_empty(sum(totals[1]))
    transport.all_to_all_v(message, came, *totals).wait()
    kept = give[transport.rank]
    sent = message.nbytes - int(kept.sum()) + give.nbytes - kept.nbytes
    return transpose_packets(came, take), sent
