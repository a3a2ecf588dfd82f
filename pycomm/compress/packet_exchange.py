"""Compact packets on their way: units coded, sent to all ranks in one message, and read again.

A unit's packet has a length of its own, so lengths go ahead: int32 [units], of all ranks. Behind
them one message of each rank holds its packets, end to end. Both stand behind the last gradient.
Packets travel through host memory: those of a GPU are coded there, copied when they are short, and
copied back before they are read.
docs/compression.md has the meaning, csrc/kernels/lean.h the packets. Called by transaction.py, and
by sharded.py for its second half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pycomm import kernels
from pycomm.calls import Work
from pycomm.compress.bucket import Arrived, CompressionBucket, Pair
from pycomm.errors import InvalidArgument
from pycomm.kernels import PacketBatch

__all__ = [
    "AllGatherExchange",
    "PacketTransport",
    "Packets",
    "all_gather",
    "decode",
    "encode",
    "quantization_error",
    "transpose_packets",
]

Packets = tuple[Tensor, Sequence[int]]  # uint8 in host memory, end to end, and the bytes of each


class PacketTransport(Protocol):
    """Sends packets: a CommunicatorPool between ranks, or Hosts, each of which counts as a rank."""

    @property
    def rank(self) -> int:
        """This one."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_gather(self, x: Tensor, out: Tensor) -> Work:
        """As of CommunicatorPool; so are the others."""

    def all_gather_v(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> Work:
        """See CommunicatorPool."""

    def all_to_all(self, x: Tensor, out: Tensor) -> Work:
        """See CommunicatorPool."""

    def all_to_all_v(
        self, x: Tensor, out: Tensor, give: Sequence[int], take: Sequence[int]
    ) -> Work:
        """See CommunicatorPool."""


class AllGatherExchange:
    """The exchange "gather" with compact packets: each rank's go to all.

    Attributes:
        value_dtype: of values on the way, as pycomm.kernels.encode has it.
    """

    def __init__(self, value_dtype: str) -> None:
        self.value_dtype = value_dtype

    def exchange(
        self, units: Sequence[CompressionBucket], transport: PacketTransport
    ) -> tuple[list[Arrived], int]:
        """Collective. What has arrived for each unit, and the bytes that this rank has given."""
        everyone, sent = all_gather(self._coded(units), transport)
        found = []
        for unit, packets in zip(units, everyone, strict=True):
            came = decode(packets, unit.count, unit.values.device)
            mine = torch.split(came.values, list(came.lengths))[transport.rank]
            found.append(Arrived(unit, came, quantization_error(unit.values, mine)))
        return found, sent

    def commit(self) -> None:
        """Holds nothing from step to step."""

    def lost(self, units: Sequence[CompressionBucket], size: int) -> list[Tensor]:
        """What rounding takes, which is the same each time."""
        return [
            quantization_error(
                unit.values, decode((packet, [len(packet)]), unit.count, unit.values.device)[1]
            )
            for unit, packet in zip(units, self._coded(units), strict=True)
        ]

    def _coded(self, units: Sequence[CompressionBucket]) -> list[Tensor]:
        """A packet of each."""
        return [
            encode(PacketBatch(u.indices, u.values, [len(u.values)]), u.count, self.value_dtype)[0]
            for u in units
        ]


def encode(batch: PacketBatch, count: int, value_dtype: str) -> Packets:
    """Compact packets of the fewest bytes; of nothing, none at all."""
    if batch.values.is_cpu:
        packets: Packets = kernels.encode_batch(batch, count, value_dtype)
        return packets
    lengths = list(batch.lengths)
    parts = (torch.split(part, lengths) for part in (batch.indices, batch.values))
    each = [_written(pair, count, value_dtype) for pair in zip(*parts, strict=True)]
    return torch.cat(each), [len(packet) for packet in each]


def decode(packets: Packets, count: int, device: torch.device) -> PacketBatch:
    """What `encode` was given, its values as they have arrived, on the device.

    Raises:
        InvalidArgument: the bytes are no packets, or of another array.
    """
    message, sizes = packets
    if device.type == "cpu":
        return kernels.decode_batch(message, sizes, count)
    pairs = [_read(packet, count, device) for packet in torch.split(message, list(sizes))]
    indices, values = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return PacketBatch(indices, values, [len(pair[0]) for pair in pairs])


def _written(pair: Pair, count: int, value_dtype: str) -> Tensor:
    if not len(pair[0]):
        return torch.empty(0, dtype=torch.uint8)
    packet: Tensor = kernels.encode(*pair, count, value_dtype, codec="auto")
    return packet.cpu()


def _read(packet: Tensor, count: int, device: torch.device) -> Pair:
    if not len(packet):
        return torch.empty(0, dtype=torch.int32, device=device), torch.empty(0, device=device)
    indices, values = kernels.unpack(packet.to(device), codec="auto")
    if len(indices) and int(indices[-1]) >= count:
        raise InvalidArgument(f"DGC: a packet has index {int(indices[-1])} of {count} elements")
    return indices, values


def quantization_error(values: Tensor, arrived: Tensor) -> Tensor:
    """What is still owed of `values`. What has arrived as NaN or Inf shall not stay: nothing."""
    lost = values - arrived
    return torch.where(lost.isfinite(), lost, 0)


def all_gather(packets: Sequence[Tensor], transport: PacketTransport) -> tuple[list[Packets], int]:
    """Collective. By packet: those of all ranks, in rank order; and the bytes that were given."""
    mine = torch.tensor([len(packet) for packet in packets], dtype=torch.int32)
    lengths = mine.new_empty((transport.size, len(packets)))
    transport.all_gather(mine, lengths).wait()
    totals = lengths.sum(1).tolist()
    message = torch.cat(list(packets))
    whole = message.new_empty(sum(totals))
    transport.all_gather_v(message, whole, totals).wait()
    return transpose_packets(whole, lengths), mine.nbytes + message.nbytes


def transpose_packets(message: Tensor, sizes: Tensor) -> list[Packets]:
    """Packets that lie in rows, with `sizes` bytes [rows, columns] each: by column."""
    columns = sizes.T.tolist()
    if len(columns) == 1:
        return [(message, columns[0])]
    each = torch.split(message, sizes.flatten().tolist())
    return [(torch.cat(each[i :: len(columns)]), own) for i, own in enumerate(columns)]
