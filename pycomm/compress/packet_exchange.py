"""Exchange of compact packets: encode buckets, send one message to all ranks, decode.

A bucket's packet has a variable length, so the lengths are exchanged first: int32 [units] of each
rank. Then one message of each rank has its packets, concatenated. Both follow the last gradient of
a step. Packets are sent through host memory: a GPU's packets are encoded on the GPU, copied to the
host, and copied back before they are decoded.
docs/compression.md has the meaning, csrc/codec/compact.h the layout of packets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pycomm import kernels
from pycomm._core_api.calls import Work
from pycomm.compress.bucket import CompressionBucket, Pair, ReceivedPackets
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

Packets = tuple[Tensor, Sequence[int]]  # concatenated, uint8 in host memory; bytes of each


class PacketTransport(Protocol):
    """Transfers packets: a CommunicatorPool between ranks, or Hosts, where a host is a rank."""

    @property
    def rank(self) -> int:
        """The index of this rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_gather(self, x: Tensor, out: Tensor) -> Work:
        """See CommunicatorPool."""

    def all_gather_v(self, x: Tensor, out: Tensor, counts: Sequence[int]) -> Work:
        """See CommunicatorPool."""

    def all_to_all(self, x: Tensor, out: Tensor) -> Work:
        """See CommunicatorPool."""

    def all_to_all_v(
        self, x: Tensor, out: Tensor, give: Sequence[int], take: Sequence[int]
    ) -> Work:
        """See CommunicatorPool."""


class AllGatherExchange:
    """The exchange "gather" with compact packets: an all-gather.

    Attributes:
        value_dtype: dtype of encoded values, as in pycomm.kernels.encode.
    """

    def __init__(self, value_dtype: str) -> None:
        self.value_dtype = value_dtype

    def exchange(
        self, units: Sequence[CompressionBucket], transport: PacketTransport
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

    def lost(self, units: Sequence[CompressionBucket], size: int) -> list[Tensor]:
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


def encode(batch: PacketBatch, count: int, value_dtype: str) -> Packets:
    """Compact packets with the shortest codec; a packet without elements has 0 bytes."""
    if batch.values.is_cpu:
        packets: Packets = kernels.encode_batch(batch, count, value_dtype)
        return packets
    lengths = list(batch.lengths)
    parts = (torch.split(part, lengths) for part in (batch.indices, batch.values))
    each = [_encode_pair(pair, count, value_dtype) for pair in zip(*parts, strict=True)]
    return torch.cat(each), [len(packet) for packet in each]


def decode(packets: Packets, count: int, device: torch.device) -> PacketBatch:
    """Decodes packets of an array of `count` elements to arrays on the device.

    Raises:
        InvalidArgument: the bytes are not packets, or they are of another array.
    """
    message, sizes = packets
    if device.type == "cpu":
        return kernels.decode_batch(message, sizes, count)
    pairs = [_decode_pair(packet, count, device) for packet in torch.split(message, list(sizes))]
    indices, values = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return PacketBatch(indices, values, [len(pair[0]) for pair in pairs])


def _encode_pair(pair: Pair, count: int, value_dtype: str) -> Tensor:
    if not len(pair[0]):
        return torch.empty(0, dtype=torch.uint8)
    packet: Tensor = kernels.encode(*pair, count, value_dtype, codec="auto")
    return packet.cpu()


def _decode_pair(packet: Tensor, count: int, device: torch.device) -> Pair:
    if not len(packet):
        return torch.empty(0, dtype=torch.int32, device=device), torch.empty(0, device=device)
    indices, values = kernels.unpack(packet.to(device), codec="auto")
    if len(indices) and int(indices[-1]) >= count:
        raise InvalidArgument(
            f"DGC: invalid index in a packet: got {int(indices[-1])}, expected below {count}"
        )
    return indices, values


def quantization_error(values: Tensor, decoded: Tensor) -> Tensor:
    """The residual of `values` after quantization; 0 where it would be NaN or infinite."""
    lost = values - decoded
    return torch.where(lost.isfinite(), lost, 0)


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


def transpose_packets(message: Tensor, sizes: Tensor) -> list[Packets]:
    """Reorders concatenated packets from rows to columns; `sizes`: bytes, [rows, columns]."""
    columns = sizes.T.tolist()
    if len(columns) == 1:
        return [(message, columns[0])]
    each = torch.split(message, sizes.flatten().tolist())
    return [(torch.cat(each[i :: len(columns)]), own) for i, own in enumerate(columns)]
