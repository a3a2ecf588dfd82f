"""Exchange of compact packets: encode buckets, send one message to all ranks, decode.

A bucket's packet has a variable length, so the lengths are exchanged first: int32 [units] of each
rank. Then one message of each rank has its packets, concatenated. Both follow the last gradient of
a step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from pycomm._training.communicators import CommunicatorPool
from pycomm.compress.bucket import CompressionBucket, ReceivedPackets
from pycomm.compress.hierarchical import HostGroups
from pycomm.compress.interrupts import defer_sigint
from pycomm.compress.packet_codec import Packets, decode, encode
from pycomm.compress.parameter_state import ParameterState
from pycomm.compress.residual import Transaction
from pycomm.kernels import PacketBatch

Number = TypeVar("Number", int, Tensor)


PacketTransport = CommunicatorPool | HostGroups  # of ranks, or of hosts in place of ranks


class AllGatherExchange:
    """The exchange "gather" with compact packets: an all-gather.

    Attributes:
        value_dtype: dtype of encoded values, as in pycomm.kernels.encode.
    """

    def __init__(self, value_dtype: str) -> None:
        self.value_dtype = value_dtype

    def exchange(
        self,
        units: Sequence[CompressionBucket],
        transport: PacketTransport,
        transaction: Transaction,
        unused: Collection[ParameterState] = (),
    ) -> tuple[list[ReceivedPackets], int]:
        """Collective, after the last gradient. The packets received for each bucket, and the bytes
        that this rank sent. Quantization errors return to v, also if the exchange fails, since
        another rank may complete it. Nothing of `unused` parameters is sent on."""
        packets = [
            encode(PacketBatch(u.indices, u.values, [len(u.values)]), u.count, self.value_dtype)
            for u in units
        ]
        own: list[Tensor] = []  # decoded values of this rank, by bucket
        try:
            gathered, sent = all_gather([packet for packet, _ in packets], transport)
            found = []
            for unit, received in zip(units, gathered, strict=True):
                batch = decode(received, unit.count, unit.values.device)
                found.append(ReceivedPackets(unit, batch))
                own.append(torch.split(batch.values, list(batch.lengths))[transport.rank])
        finally:
            with defer_sigint():
                for unit, packet in zip(units[len(own) :], packets[len(own) :], strict=True):
                    own.append(decode(packet, unit.count, unit.values.device).values)
                for unit, values in zip(units, own, strict=True):
                    unit.restore_error(values)
        return found, sent


def all_gather(packets: Sequence[Tensor], transport: PacketTransport) -> tuple[list[Packets], int]:
    """Collective. For each packet those of all ranks, in rank order; and the bytes sent."""
    mine = torch.tensor([len(packet) for packet in packets], dtype=torch.int32)
    lengths = mine.new_empty((transport.size, len(packets)))
    transport.all_gather(mine, lengths).wait()
    totals = lengths.sum(1).tolist()
    message = torch.cat(list(packets))
    whole = message.new_empty(sum(totals))
    transport.all_gather_v(message, whole, totals).wait()
    return transpose_packets(whole, lengths), mine.nbytes + message.nbytes


def rotation(row: Number, size: int) -> Number:
    """By how much the row with this number, or the rows with these, are rotated: a row has one
    piece for each of `size` owners, and a hash keeps a stride of pieces from having one owner."""
    return ((row * 0x9E3779B1 & 0xFFFFFFFF) >> 16) % size


def to_owners(packets: Sequence[Packets], transport: PacketTransport) -> tuple[list[Packets], int]:
    """Collective. Sends each bucket's packets to their owners. Returns for each bucket the packets
    of all ranks for this owner, in rank order; and the bytes sent to other ranks."""
    mine = torch.tensor([sizes for _, sizes in packets], dtype=torch.int32)
    sent_sizes = mine.T.contiguous()  # [size, units]
    received_sizes = torch.empty_like(sent_sizes)
    transport.all_to_all(sent_sizes, received_sizes).wait()
    by_owner = transpose_packets(torch.cat([message for message, _ in packets]), mine)
    message = torch.cat([part for part, _ in by_owner])
    totals = [lengths.sum(1).tolist() for lengths in (sent_sizes, received_sizes)]
    received = message.new_empty(sum(totals[1]))
    transport.all_to_all_v(message, received, *totals).wait()
    own = sent_sizes[transport.rank]
    sent = message.nbytes - int(own.sum()) + sent_sizes.nbytes - own.nbytes
    return transpose_packets(received, received_sizes), sent


def transpose_packets(message: Tensor, sizes: Tensor) -> list[Packets]:
    """Reorders concatenated packets from rows to columns; `sizes`: bytes, [rows, columns]."""
    columns = sizes.T.tolist()
    if len(columns) == 1:
        return [(message, columns[0])]
    each = torch.split(message, sizes.flatten().tolist())
    return [(torch.cat(each[i :: len(columns)]), own) for i, own in enumerate(columns)]
