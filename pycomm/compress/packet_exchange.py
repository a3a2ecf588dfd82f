"""Exchange of coded packets: one message of each rank to all, or to each owner.

A message has the packets of several parts, concatenated: of DGC's buckets, or of TopK's units. The
bytes of a packet vary, so the ranks first exchange, in host memory, those of all packets and their
elements. The message is where the arrays are: on GPUs NCCL sends it. docs/kernels.md has the layout
of packets.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

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
NO_WORD = torch.empty(0, dtype=torch.uint8)


class Packets(NamedTuple):
    """Packets of one part.

    Attributes:
        message: uint8, all of them, concatenated.
        sizes, lengths: bytes and elements, or groups, of each.
    """

    message: Tensor
    sizes: Sequence[int]
    lengths: Sequence[int]


class Received(NamedTuple):
    """What an exchange brought.

    Attributes:
        parts: for each part the packets of all ranks, in rank order.
        words: of each rank, in rank order.
        sent_bytes: bytes that this rank sent.
    """

    parts: list[Packets]
    words: list[Tensor]
    sent_bytes: int


def encode(
    batch: PacketBatch, counts: Sequence[int], value_dtype: str, errors: Tensor | None = None
) -> Packets:
    """Packets of arrays with these counts, each with the shortest index code, as
    pycomm.kernels.encode_batch. On a GPU it waits once."""
    packets = kernels.encode_batch(batch, counts, value_dtype, errors=errors)
    return Packets(torch.cat(packets), [len(packet) for packet in packets], batch.lengths)


def decode(packets: Packets, counts: Sequence[int], device: torch.device) -> PacketBatch:
    """Decodes packets of arrays with these counts to arrays on the device, for which it waits.

    Raises:
        InvalidArgument: the bytes are not packets, or they are of other arrays.
    """
    message = packets.message.to(device)
    return kernels.decode_batch(message, packets.sizes, packets.lengths, counts)


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
        gathered = all_gather(mine, transport)
        found = []
        for bucket, packets in zip(buckets, gathered.parts, strict=True):
            batch = decode(packets, bucket.counts, bucket.values.device)
            found.append(ReceivedPackets(bucket, by_holder(batch, transport.size)))
        return found, gathered.sent_bytes

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


def all_gather(
    parts: Sequence[Packets], transport: PacketTransport, word: Tensor = NO_WORD
) -> Received:
    """Collective. Sends the packets of each part to all ranks, with a `word` of equally many bytes
    on all ranks, uint8."""
    mine = torch.cat([_numbers(parts, 1).view(torch.uint8).flatten(), word])
    rows = mine.new_empty((transport.size, len(mine)))
    transport.all_gather(mine, rows).wait()
    numbers, words = _numbers_of(rows, parts, 1, word)
    totals = numbers[:, 0].sum(1).tolist()
    message = _joined([part.message for part in parts])
    whole = message.new_empty(sum(totals))
    transport.all_gather_v(message, whole, totals).wait_for_device()
    found = _by_part(whole, numbers, [len(part.sizes) for part in parts])
    return Received(found, words, mine.nbytes + message.nbytes)


def rotation(row: Number, size: int) -> Number:
    """By how much the row with this number, or the rows with these, are rotated: a row has one
    piece for each of `size` owners, and a hash keeps a stride of pieces from having one owner."""
    return ((row * 0x9E3779B1 & 0xFFFFFFFF) >> 16) % size


def to_owners(
    parts: Sequence[Packets], transport: PacketTransport, word: Tensor = NO_WORD
) -> Received:
    """Collective. Sends each part's packets to their owners: a part has equally many for each, in
    order. Received are the packets of all ranks for this owner; see all_gather."""
    size = transport.size
    given = _numbers(parts, size)
    rows = torch.cat([given.view(torch.uint8).view(size, -1), word.expand(size, -1)], 1)
    found_rows = torch.empty_like(rows)
    transport.all_to_all(rows, found_rows).wait()
    numbers, words = _numbers_of(found_rows, parts, size, word)
    widths = [len(part.sizes) // size for part in parts]
    cuts = [
        torch.split(part.message, sizes.sum(1).tolist())
        for part, sizes in zip(parts, torch.split(given[:, 0], widths, 1), strict=True)
    ]
    message = _joined([cut[owner] for owner in range(size) for cut in cuts])
    totals = [each[:, 0].sum(1).tolist() for each in (given, numbers)]
    received = message.new_empty(sum(totals[1]))
    transport.all_to_all_v(message, received, *totals).wait_for_device()
    sent = message.nbytes - totals[0][transport.rank] + rows.nbytes // size * (size - 1)
    return Received(_by_part(received, numbers, widths), words, sent)


def _numbers(parts: Sequence[Packets], size: int) -> Tensor:
    """Sizes and lengths of the packets for each of `size` holders, int32 [size, 2, packets]."""
    each = [torch.tensor([part.sizes, part.lengths], dtype=torch.int32) for part in parts]
    return torch.cat([one.view(2, size, -1).transpose(0, 1) for one in each], 2).contiguous()


def _numbers_of(
    rows: Tensor, parts: Sequence[Packets], size: int, word: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The numbers, and the words, in the rows of all holders."""
    packets = sum(len(part.sizes) for part in parts) // size
    numbers = rows[:, : 8 * packets].flatten().view(torch.int32).view(-1, 2, packets)
    return numbers, list(rows[:, len(rows[0]) - len(word) :])


def _joined(messages: Sequence[Tensor]) -> Tensor:
    """One message, in host memory if they are on several devices."""
    if len({message.device for message in messages}) > 1:
        messages = [message.cpu() for message in messages]
    return torch.cat(list(messages))


def _by_part(message: Tensor, numbers: Tensor, widths: Sequence[int]) -> list[Packets]:
    """Cuts a message into parts. `numbers`: of all packets, [holders, 2, packets], of which each
    part has `widths` neighbours."""
    parts = torch.split(numbers, list(widths), 2)
    nbytes = torch.stack([part[:, 0].sum(1) for part in parts], 1)  # [holders, parts]
    cut = torch.split(message, nbytes.flatten().tolist())
    return [
        Packets(
            message if len(parts) == 1 else torch.cat(cut[i :: len(parts)]),
            part[:, 0].flatten().tolist(),
            part[:, 1].flatten().tolist(),
        )
        for i, part in enumerate(parts)
    ]
