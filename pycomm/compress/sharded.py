"""The exchange "sharded": each rank owns a shard of the coordinates and sums the packets for it.

    cut         the selected elements by owner and array, encoded as one packet for each of both
    all-to-all  sizes, then packets to their owners
    sum         the owner adds the packets in rank order to its residual and selects the largest
    all-gather  the encoded selection, with indices relative to the shard; the rest and the
                quantization error stay in the residual

A rank receives about (1 + owner_k_factor) k elements, independent of the number of ranks. No
gradient is lost: sent + v + owner_residual = gradients. All arrays of a bucket are coded together.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pycomm import kernels
from pycomm.compress.bucket import CompressionBucket, ReceivedPackets, finite
from pycomm.compress.packet_exchange import (
    AllGatherExchange,
    Packets,
    PacketTransport,
    all_gather,
    by_holder,
    decode,
    encode,
    rotation,
    to_owners,
)
from pycomm.compress.parameter_state import ParameterState
from pycomm.compress.residual import Entry, Transaction
from pycomm.kernels import PacketBatch

BLOCK = 32  # contiguous elements of one shard: selected elements cluster, shards must not


@dataclass(frozen=True)
class Sharding:
    """Assigns the elements of each of several arrays to `size` owners. A row has one block for each
    rank, rotated by a hash of the row number, so that no stride of a matrix always has the same
    owner.

        row 0   block 0 -> rank 1    block 1 -> rank 2    block 2 -> rank 0     rotated by 1
        row 1   block 3 -> rank 0    block 4 -> rank 1    block 5 -> rank 2     rotated by 0

    A rank owns one block of each row. A place in its shard is row * BLOCK + place in the block,
    which ascends with the coordinate. The last row may have fewer blocks. Coordinates and places
    count through all arrays, concatenated.
    """

    counts: Sequence[int]
    size: int

    @property
    def places(self) -> list[int]:
        """The number of places of a shard of each array, the same for all ranks."""
        return [-(-count // (BLOCK * self.size)) * BLOCK for count in self.counts]

    def cut(self, indices: Tensor, values: Tensor) -> tuple[PacketBatch, Tensor]:
        """For each owner, and of it for each array, the places in its shard, ascending, and the
        values. Also the order of the elements in it."""
        array, local = _within(indices, self.counts)
        block, within = local // BLOCK, local % BLOCK
        row = block // self.size
        owner = (block + rotation(row, self.size)) % self.size
        packet = owner * len(self.counts) + array
        order = torch.argsort(packet, stable=True)
        lengths = torch.bincount(packet, minlength=self.size * len(self.counts)).tolist()
        firsts = _bounds(tuple(self.places), indices.device)
        places = (firsts[array] + row * BLOCK + within).to(torch.int32)
        return PacketBatch(places[order], values[order], lengths), order

    def whole(self, owner: int | Tensor, places: Tensor) -> Tensor:
        """The ascending coordinates of places in the shard of `owner`, one rank or one by place;
        the sum of all counts for places after the end of an array."""
        array, local = _within(places, self.places)
        row, within = local // BLOCK, local % BLOCK
        block = row * self.size + (owner - rotation(row, self.size)) % self.size
        found = block * BLOCK + within
        bounds = _bounds(tuple(self.counts), places.device)
        begin, end = bounds[array], bounds[array + 1]
        return torch.where(found < end - begin, begin + found, bounds[-1]).to(torch.int32)

    def joined(self, batch: PacketBatch) -> Tensor:
        """The coordinates of a batch of packets for each owner, in order, and of it each array."""
        lengths = torch.tensor(by_holder(batch, self.size).lengths, device=batch.indices.device)
        owners = torch.repeat_interleave(lengths, output_size=len(batch.indices))
        return self.whole(owners, batch.indices)


class ShardedExchange(AllGatherExchange):
    """The exchange of one step.

    Attributes:
        value_dtype: of encoded values in both phases.
        owned: the residual of this rank as an owner, by the key of an array: [places of the
            shard], of u's dtype. Owned by the caller.
        owner_k_factor: elements that all owners together send, in multiples of one rank's k.
    """

    def __init__(self, value_dtype: str, owned: dict[str, Tensor], owner_k_factor: int = 1) -> None:
        super().__init__(value_dtype)
        self.owned, self.owner_k_factor = owned, owner_k_factor

    def exchange(
        self,
        buckets: Sequence[CompressionBucket],
        transport: PacketTransport,
        transaction: Transaction,
        unused: Collection[ParameterState] = (),
    ) -> tuple[list[ReceivedPackets], int]:
        shares = [Sharding(bucket.counts, transport.size) for bucket in buckets]
        both = list(zip(buckets, shares, strict=True))
        received = to_owners([self._cut(bucket, share) for bucket, share in both], transport)
        chosen = []
        for (bucket, share), packets in zip(both, received.parts, strict=True):
            kept_back = _places_of(unused, bucket, share, transport.rank)
            packet, rests = self._choose(bucket, share, packets, kept_back)
            chosen.append(packet)
            for key, rest in zip(bucket.keys, rests, strict=True):
                transaction.record(Entry(self.owned, key, rest))
        gathered = all_gather(chosen, transport)
        found = []
        for (bucket, share), packets in zip(both, gathered.parts, strict=True):
            sums = decode(packets, share.places, bucket.values.device)
            sums = by_holder(sums._replace(indices=share.joined(sums)), share.size)
            found.append(ReceivedPackets(bucket, sums))
        return found, received.sent_bytes + gathered.sent_bytes

    def _cut(self, bucket: CompressionBucket, share: Sharding) -> Packets:
        """The packets of a bucket for each owner, whose quantization errors return to v."""
        batch, order = share.cut(bucket.indices, bucket.values)
        left = torch.empty_like(batch.values)
        packets = encode(batch, share.places, self.value_dtype, left)
        errors = torch.empty_like(left)
        errors[order] = left
        bucket.restore_errors(errors)
        return packets

    def _choose(
        self, bucket: CompressionBucket, share: Sharding, packets: Packets, kept_back: Tensor | None
    ) -> tuple[Packets, Sequence[Tensor]]:
        """The packets of the largest sums in this owner's shards: its part of owner_k_factor k of
        each array. The rests are the new residuals of the owner, as before at the places
        `kept_back`."""
        device, counts = bucket.values.device, share.places
        total = torch.zeros(sum(counts), dtype=bucket.values.dtype, device=device)
        kernels.decode_sum(total, by_holder(decode(packets, counts, device), share.size))
        rests = torch.split(total, counts)
        for key, rest in zip(bucket.keys, rests, strict=True):
            if key in self.owned:
                rest.add_(self.owned[key])
        if kept_back is not None:
            total[kept_back] = 0
        ks = [
            min(-(-self.owner_k_factor * k // share.size), count)
            for k, count in zip(bucket.lengths, counts, strict=True)
        ]
        found = [kernels.topk(rest, k) for rest, k in zip(rests, ks, strict=True)]
        firsts = _bounds(tuple(counts), device)
        places = torch.cat([one + first for (one, _), first in zip(found, firsts, strict=False)])
        values = torch.cat([one for _, one in found])
        some = (values != 0).nonzero().flatten()
        array, _ = _within(some, ks)
        lengths = torch.bincount(array, minlength=len(ks)).tolist()
        kept = PacketBatch(places[some].to(torch.int32), values[some], lengths)
        errors = torch.empty_like(kept.values)
        packet = encode(kept, counts, self.value_dtype, errors)
        total[kept.indices] = finite(errors)
        if kept_back is not None:
            before = [self.owned.get(key) for key in bucket.keys]
            old = [
                torch.zeros_like(x) if b is None else b for x, b in zip(rests, before, strict=True)
            ]
            total[kept_back] = torch.cat(old)[kept_back]
        return packet, rests


@functools.lru_cache(64)
def _bounds(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """The first coordinate of each array, and the number of all coordinates."""
    return torch.tensor([0, *counts], device=device).cumsum(0)


def _within(indices: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The array of each index, and the index in it."""
    bounds = _bounds(tuple(counts), indices.device)
    array = torch.bucketize(indices.long(), bounds[1:-1], right=True)
    return array, indices.long() - bounds[array]


def _places_of(
    unused: Collection[ParameterState], bucket: CompressionBucket, share: Sharding, rank: int
) -> Tensor | None:
    """The places of these parameters in the shard of an owner; None if there are none."""
    if not any(memory in unused for memory in bucket.memories):
        return None
    device = bucket.values.device
    whole = share.whole(rank, torch.arange(sum(share.places), device=device))
    counts = [memory.count for memory in bucket.memories]
    of_unused = torch.tensor([memory in unused for memory in bucket.memories], device=device)
    place = torch.bucketize(whole.long(), _bounds(tuple(counts), device)[1:], right=True)
    return torch.cat([of_unused, of_unused.new_zeros(1)])[place].nonzero().flatten()
