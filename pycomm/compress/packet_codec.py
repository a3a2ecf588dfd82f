"""Encodes selected elements as compact packets, and decodes them, on the elements' device.

Packets are sent through host memory: a GPU's packets are encoded on the GPU, copied to the host,
and copied back before they are decoded. docs/kernels.md has the layout of packets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pycomm import kernels
from pycomm.compress.bucket import Pair
from pycomm.errors import InvalidArgument
from pycomm.kernels import PacketBatch

__all__ = ["Packets", "decode", "encode", "quantization_error"]

Packets = tuple[Tensor, Sequence[int]]  # concatenated, uint8 in host memory; bytes of each


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
    error = values - decoded
    return torch.where(error.isfinite(), error, 0)
