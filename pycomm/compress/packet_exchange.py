"""Exchange of compact packets: encode buckets, send one message to all ranks, decode.

A bucket's packet has a variable length, so the lengths are exchanged first: int32 [units] of each
rank. Then one message of each rank has its packets, concatenated. Both follow the last gradient of
a step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from pycomm._core_api.calls import Waitable
from pycomm.compress.bucket import CompressionBucket, ReceivedPackets
from pycomm.compress.packet_codec import Packets, decode, encode, quantization_error
from pycomm.compress.parameter_state import ParameterState
from pycomm.kernels import PacketBatch

Number = TypeVar("Number", int, Tensor)


class PacketTransport(Protocol):
    """Transfers packets: a CommunicatorPool of ranks, or HostGroups, where a host is a rank."""

    @property
    def rank(self) -> int:
        """The index of this rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_gather(self, x: Tensor, out: Tensor) -> Waitable:
        """See CommunicatorPool."""

    def all_gather_v(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> Waitable:
        """See CommunicatorPool."""

    def all_to_all(self, x: Tensor, out: Tensor) -> Waitable:
        """See CommunicatorPool."""

    def all_to_all_v(
        self, x: Tensor, out: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Waitable:
        """See CommunicatorPool."""


class PacketExchange(Protocol):
    """An exchange of the compact packets of one step: AllGatherExchange, sharded.py."""

    def exchange(
        self,
        units: Sequence[CompressionBucket],
        transport: PacketTransport,
        unused: Collection[ParameterState] = (),
    ) -> tuple[list[ReceivedPackets], int]:
        """Collective, after the last gradient: the received packets, and the bytes sent. No
        persistent state changes. Nothing of `unused` parameters is sent on."""

    def commit(self) -> None:
        """Stores the persistent result of exchange()."""

    def quantization_errors(self, units: Sequence[CompressionBucket], size: int) -> list[Tensor]:
        """The quantization error [k] of each bucket, for an exchange of `size` ranks that failed on
        this rank after other ranks completed it."""


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
        unused: Collection[ParameterState] = (),
    ) -> tuple[list[ReceivedPackets], int]:
        """Collective. The packets received for each bucket, and the bytes that this rank sent."""
        gathered, sent = all_gather(self._encode_each(units), transport)
        found = []
        for unit, packets in zip(units, gathered, strict=True):
            received = decode(packets, unit.count, unit.values.device)
            mine = torch.split(received.values, list(received.lengths))[transport.rank]
            found.append(ReceivedPackets(unit, received, quantization_error(unit.values, mine)))
        return found, sent

    def commit(self) -> None:
        """Does nothing: there is no state between steps."""

    def quantization_errors(self, units: Sequence[CompressionBucket], size: int) -> list[Tensor]:
        """The quantization error of each bucket, which is deterministic."""
        return [
            quantization_error(
                unit.values, decode((packet, [len(packet)]), unit.count, unit.values.device)[1]
            )
            for unit, packet in zip(units, self._encode_each(units), strict=True)
        ]

    def _encode_each(self, units: Sequence[CompressionBucket]) -> list[Tensor]:
        """The packet of each bucket."""
        return [
            encode(PacketBatch(u.indices, u.values, [len(u.values)]), u.count, self.value_dtype)[0]
            for u in units
        ]


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
