"""Many packets in one call: the results of `encode`, `unpack` and pairs one by one; and errors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_devices import same
from properties import SETTINGS

from pycomm import kernels
from pycomm.errors import InvalidArgument
from pycomm.kernels import PacketBatch
from pycomm.reference import compact as reference_compact

CODECS = ("auto", *reference_compact.INDEX_CODES)


def batch_of(count, packets, seed, dtype="float32"):
    """Some empty, some with every element."""
    rng = np.random.default_rng(seed)
    lengths = [int(rng.choice([0, 1, count // 9, count])) for _ in range(packets)]
    indices = [np.sort(rng.choice(count, k, replace=False)).astype(np.int32) for k in lengths]
    values = rng.standard_normal(sum(lengths)).astype(dtype)
    return PacketBatch(np.concatenate([np.empty(0, np.int32), *indices]), values, lengths)


def pairs_of(batch):
    ends = np.cumsum(batch.lengths)[:-1]
    return list(zip(np.split(batch.indices, ends), np.split(batch.values, ends), strict=True))


@SETTINGS
@given(
    counts=st.lists(st.sampled_from([1, 64, 900, 4097]), min_size=1, max_size=3),
    times=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["float32", "float64"]),
    value_dtype=st.sampled_from(reference_compact.VALUE_CODES),
    codec=st.sampled_from(CODECS),
)
def test_batch_equals_single_packets(device, counts, times, seed, dtype, value_dtype, codec):
    """Packets of several arrays, through which the indices count."""
    firsts = np.cumsum([0, *counts])[:-1].tolist() * times
    each = [batch_of(count, 1, seed + i, dtype) for i, count in enumerate(counts * times)]
    batch = PacketBatch(
        device.put(np.concatenate([own.indices + f for own, f in zip(each, firsts, strict=True)])),
        device.put(np.concatenate([own.values for own in each])),
        [own.lengths[0] for own in each],
    )
    errors = device.put(np.ones(sum(batch.lengths), dtype))
    packets = kernels.encode_batch(batch, counts, value_dtype, codec=codec, errors=errors)
    lost = []
    for own, count, packet in zip(each, counts * times, packets, strict=True):
        if not own.lengths[0]:
            assert len(packet) == 0
            continue
        zeros = np.zeros(count, dtype)
        want, rest = reference_compact.encode(
            own.indices, own.values, count, value_dtype, zeros, index_code=codec
        )
        assert device.get(packet).tobytes() == want
        lost.append(rest[own.indices])
    same(device.get(errors), np.concatenate([np.empty(0, dtype), *lost]))
    message = np.concatenate([device.get(packet) for packet in packets])
    sizes = [len(packet) for packet in packets]
    decoded = kernels.decode_batch(device.put(message), sizes, batch.lengths, counts)
    assert decoded.lengths == batch.lengths
    same(device.get(decoded.indices), device.get(batch.indices))
    values = [kernels.unpack(device.get(packet))[1] for packet in packets if len(packet)]
    same(device.get(decoded.values), np.concatenate([np.empty(0, np.float32), *values]))


@SETTINGS
@given(packets=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_sums_equal_those_of_the_pairs(packets, seed):
    count = 900
    batch = batch_of(count, packets, seed)
    out = [np.ones(count - 7, np.float32), np.ones(7, np.float32)]  # indices count through both
    want = kernels.decode_sum([x.copy() for x in out], pairs_of(batch), 0.5)
    for mine, theirs in zip(kernels.decode_sum(out, batch, 0.5), want, strict=True):
        same(mine, theirs)
    param = np.ones(count, np.float32)
    want = kernels.decode_update(param.copy(), pairs_of(batch), 0.1)
    same(kernels.decode_update(param, batch, 0.1), want)


def test_torch_inputs_and_outputs():
    batch = PacketBatch(
        torch.tensor([3, 1], dtype=torch.int32), torch.tensor([0.5, 2.0]), [1, 0, 1]
    )
    packets = kernels.encode_batch(batch, [4], "float32")
    assert all(isinstance(packet, torch.Tensor) for packet in packets)
    decoded = kernels.decode_batch(
        torch.cat(packets), [len(packet) for packet in packets], batch.lengths, [4]
    )
    assert torch.equal(decoded.indices, batch.indices)
    assert torch.equal(decoded.values, batch.values)
    assert decoded.lengths == [1, 0, 1]


def refused(match, call, *args, **options):
    with pytest.raises(InvalidArgument, match=match):
        call(*args, **options)


def test_invalid_batches_are_rejected():
    i, x = np.arange(4, dtype=np.int32), np.ones(4, np.float32)
    good = PacketBatch(i, x, [2, 2])
    encode, decode = kernels.encode_batch, kernels.decode_batch
    refused("sum of 3", encode, PacketBatch(i, x, [2, 1]), [9], "1bit")
    refused(r"lengths\[1\]: got -1", encode, PacketBatch(i, x, [5, -1]), [9], "1bit")
    refused("sum of 4", kernels.decode_sum, np.ones(9, np.float32), PacketBatch(i, x[:3], [4]))
    refused("got dtype float16", encode, PacketBatch(i, x.astype(np.float16), [4]), [9], "1bit")
    refused("got 4, expected an integer in 0..3", encode, PacketBatch(i, x, [4]), [3], "1bit")
    refused("indices must ascend", encode, PacketBatch(i[::-1].copy(), x, [4]), [9], "1bit")
    refused("indices must ascend", encode, good, [3], "1bit")
    refused(
        "indices must ascend", encode, PacketBatch(i, x, [1, 3]), [3, 3], "1bit"
    )  # 2 is in the first array
    refused("got 3 arrays", encode, good, [9, 9, 9], "1bit")
    refused("got 0 arrays", encode, good, [], "1bit")
    refused("the sum of counts", encode, good, [2**31 - 1, 1], "1bit")
    refused("got 'half'", encode, good, [9], "half")
    refused("codec: got 'raw'", encode, good, [9], "1bit", codec="raw")
    refused("got 3 elements", encode, good, [9], "1bit", errors=x[:3].copy())
    refused("share memory", encode, good, [9], "1bit", errors=x)
    packets = encode(good, [9], "1bit")
    message, sizes = np.concatenate(packets), [len(packet) for packet in packets]
    refused("got a sum of 1 bytes", decode, message, [1], [2], [9])
    refused("invalid sizes", decode, message, [sizes[0] + sizes[1] + 1, -1], [2, 2], [9])
    refused("got k = 2 of 9 elements, expected k = 2 of 8", decode, message, sizes, [2, 2], [8])
    refused("got k = 2 of 9 elements, expected k = 2 of 8", decode, message, sizes, [2, 2], [9, 8])
    refused("got k = 2 of 9 elements, expected k = 1", decode, message, sizes, [1, 2], [9])
    refused("got 1, expected one of each of 2", decode, message, sizes, [2], [9])
    refused("0 bytes has elements", decode, message, [*sizes, 0], [2, 2, 1], [9])
    refused("invalid packet", decode, message, [sizes[0] - 1, sizes[1] + 1], [2, 2], [9])
    refused("share memory", kernels.decode_sum, x, PacketBatch(i, x, [4]))
