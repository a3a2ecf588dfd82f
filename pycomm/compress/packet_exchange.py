"""Exchange of coded packets: one message of each rank to all, or to each owner.

A message has the packets of several parts, concatenated: of DGC's buckets, or of TopK's units. The
bytes of a packet vary, so those of all packets are exchanged first: int32 [packets] of each rank.

Messages are sent through host memory: a GPU's packets are encoded on the GPU, copied to the host,
and copied back before they are decoded. docs/kernels.md has the layout of packets.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from pycomm import kernels
from pycomm._training.communicators import CommunicatorPool
from pycomm.compress.bucket import CompressionBucket, ReceivedPackets
from pycomm.compress.hierarchical import HostGroups
from pycomm.compress.parameter_state import ParameterState
from pycomm.compress.residual import Transaction
from pycomm.kernels import PacketBatch

Number = TypeVar("Number", int, Tensor)
PacketTransport = CommunicatorPool | HostGroups  # of ranks, or of hosts in place of ranks
Packets = tuple[Tensor, Sequence[int]]  # concatenated, uint8 in host memory; bytes of each


def encode(
    batch: PacketBatch, counts: Sequence[int], value_dtype: str, errors: Tensor | None = None
) -> Packets:
    """Packets of arrays with these counts, each with the shortest index code, as
    pycomm.kernels.encode_batch. On a GPU it waits twice: for the bytes of all, and for them."""
    packets = kernels.encode_batch(batch, counts, value_dtype, errors=errors)
    return torch.cat(packets).cpu(), [len(packet) for packet in packets]


def decode(packets: Packets, counts: Sequence[int], device: torch.device) -> PacketBatch:
    """Decodes packets of arrays with these counts to arrays on the device.

    Raises:
        InvalidArgument: the bytes are not packets, or they are of other arrays.
    """
    message, sizes = packets
    if device.type == "cpu":
        return kernels.decode_batch(message, sizes, counts)
    lengths = kernels.batch_lengths(message, sizes, counts)
    return kernels.decode_batch(message.to(device), sizes, counts, lengths=lengths)


class AllGatherExchange:
    """The exchange "gather" with coded packets: an all-gather.

    Attributes:
        value_dtype: dtype of encoded values, as in pycomm.kernels.encode.
    """

    def __init__(self, value_dtype: str) -> None:
        self.value_dtype = value_dtype

    def exchange(
        self,
        buckets: Sequence[CompressionBucket],
        transport: PacketTransport,
        transaction: Transaction,
        unused: Collection[ParameterState] = (),
    ) -> tuple[list[ReceivedPackets], int]:
        """Collective, after the last gradient. The packets received for each bucket, and the bytes
        that this rank sent. Quantization errors return to v, also if the exchange fails, since
        another rank may complete it. Nothing of `unused` parameters is sent on."""
        mine = [self._encoded(bucket) for bucket in buckets]
        gathered, sent = all_gather(mine, transport)
        found = []
        for bucket, packets in zip(buckets, gathered, strict=True):
            batch = decode(packets, bucket.counts, bucket.values.device)
            found.append(ReceivedPackets(bucket, by_holder(batch, transport.size)))
        return found, sent

    def _encoded(self, bucket: CompressionBucket) -> Packets:
        batch = PacketBatch(bucket.indices, bucket.values, bucket.lengths)
        errors = torch.empty_like(bucket.values)
        packets = encode(batch, bucket.counts, self.value_dtype, errors)
        bucket.restore_errors(errors)
        return packets


def by_holder(batch: PacketBatch, size: int) -> PacketBatch:
    """Joins the packets of each of `size` holders, which follow each other, to one."""
    each = len(batch.lengths) // size
    lengths = [sum(batch.lengths[i * each : (i + 1) * each]) for i in range(size)]
    return batch._replace(lengths=lengths)


def all_gather(parts: Sequence[Packets], transport: PacketTransport) -> tuple[list[Packets], int]:
    """Collective. For each part the packets of all ranks, in rank order; and the bytes sent."""
    mine = torch.tensor([nbytes for _, sizes in parts for nbytes in sizes], dtype=torch.int32)
    sizes = mine.new_empty((transport.size, len(mine)))
    transport.all_gather(mine, sizes).wait()
    totals = sizes.sum(1).tolist()
    message = torch.cat([part for part, _ in parts])
    whole = message.new_empty(sum(totals))
    transport.all_gather_v(message, whole, totals).wait()
    return _by_part(whole, sizes, [len(own) for _, own in parts]), mine.nbytes + message.nbytes


def rotation(row: Number, size: int) -> Number:
    """By how much the row with this number, or the rows with these, are rotated: a row has one
    piece for each of `size` owners, and a hash keeps a stride of pieces from having one owner."""
    return ((row * 0x9E3779B1 & 0xFFFFFFFF) >> 16) % size


def to_owners(parts: Sequence[Packets], transport: PacketTransport) -> tuple[list[Packets], int]:
    """Collective. Sends each part's packets to their owners: a part has equally many for each, in
    order. Returns for each part the packets of all ranks for this owner, in rank order; and the
    bytes sent to other ranks."""
    size = transport.size
    each = [torch.tensor(sizes, dtype=torch.int32).view(size, -1) for _, sizes in parts]
    sent_sizes = torch.cat(each, 1)  # [size, packets]
    received_sizes = torch.empty_like(sent_sizes)
    transport.all_to_all(sent_sizes, received_sizes).wait()
    cuts = [
        torch.split(message, sizes.sum(1).tolist())
        for (message, _), sizes in zip(parts, each, strict=True)
    ]
    message = torch.cat([cut[owner] for owner in range(size) for cut in cuts])
    totals = [sizes.sum(1).tolist() for sizes in (sent_sizes, received_sizes)]
    received = message.new_empty(sum(totals[1]))
    transport.all_to_all_v(message, received, *totals).wait()
    own = sent_sizes[transport.rank]
    sent = message.nbytes - int(own.sum()) + sent_sizes.nbytes - own.nbytes
    return _by_part(received, received_sizes, [sizes.shape[1] for sizes in each]), sent


def _by_part(message: Tensor, sizes: Tensor, widths: Sequence[int]) -> list[Packets]:
    """Cuts concatenated packets into parts. `sizes`: bytes, [holders, packets], of which each part
    has `widths` neighbours."""
    parts = torch.split(sizes, list(widths), 1)
    if len(parts) == 1:
        return [(message, sizes.flatten().tolist())]
    nbytes = torch.stack([part.sum(1) for part in parts], 1)  # [holders, parts]
    cut = torch.split(message, nbytes.flatten().tolist())
    return [
        (torch.cat(cut[i :: len(parts)]), part.flatten().tolist()) for i, part in enumerate(parts)
    ]
