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

Packets = tuple[Tensor, Sequence[int]]  # concatenated, uint8 in host memory; bytes of each


def encode(batch: PacketBatch, count: int, value_dtype: str) -> Packets:
    """Compact packets with the shortest codec; a packet without elements has 0 bytes."""
    if batch.values.is_cpu:
        packets: Packets = kernels.encode_batch(batch, count, value_dtype)
        return packets
    return _encode_on_device(batch, count, value_dtype)


def decode(packets: Packets, count: int, device: torch.device) -> PacketBatch:
    """Decodes packets of an array of `count` elements to arrays on the device.

    Raises:
        InvalidArgument: the bytes are not packets, or they are of another array.
    """
    message, sizes = packets
    if device.type == "cpu":
        return kernels.decode_batch(message, sizes, count)
    lengths = kernels.batch_lengths(message, sizes, count)
    return kernels.decode_batch(message.to(device), sizes, count, lengths=lengths)


def _encode_on_device(batch: PacketBatch, count: int, value_dtype: str) -> Packets:
    """Waits for the device twice: for the lengths of all packets, and for their bytes."""
    full = [i for i, length in enumerate(batch.lengths) if length]
    most = [kernels.packet_bytes(n, value_dtype, codec="auto", count=count) for n in batch.lengths]
    device = batch.values.device
    room = torch.empty(sum(most[i] for i in full), dtype=torch.uint8, device=device)
    nbytes = torch.zeros(len(batch.lengths), dtype=torch.int64, device=device)
    places = list(torch.split(room, [most[i] for i in full]))
    workspace = kernels.codec_workspace(room, max(batch.lengths, default=0))
    parts = (torch.split(part, list(batch.lengths)) for part in (batch.indices, batch.values))
    pairs: list[Pair] = list(zip(*parts, strict=True))
    for place, i in zip(places, full, strict=True):
        kernels.encode(
            *pairs[i], count, value_dtype, codec="auto", out=place, length=nbytes[i : i + 1],
            workspace=workspace,
        )  # fmt: skip
    sizes: list[int] = nbytes.tolist()
    if any(sizes[i] == 0 for i in full):
        raise InvalidArgument(f"DGC: invalid indices: they must ascend in 0..{count - 1}")
    used = [place[: sizes[i]] for place, i in zip(places, full, strict=True)]
    return torch.cat(used).cpu() if used else room.cpu(), sizes
