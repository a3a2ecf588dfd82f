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
    count=st.sampled_from([1, 64, 900, 4097]),
    packets=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["float32", "float64"]),
    value_dtype=st.sampled_from(reference_compact.VALUE_CODES),
    codec=st.sampled_from(CODECS),
)
def test_batch_equals_single_packets(count, packets, seed, dtype, value_dtype, codec):
    batch = batch_of(count, packets, seed, dtype)
    message, sizes = kernels.encode_batch(batch, count, value_dtype, codec=codec)
    decoded = kernels.decode_batch(message, sizes, count)
    assert decoded.lengths == batch.lengths
    begin = 0
    for pair, nbytes, found in zip(pairs_of(batch), sizes, pairs_of(decoded), strict=True):
        packet = message[begin : begin + nbytes]
        begin += nbytes
        if not len(pair[0]):
            assert nbytes == 0
            continue
        same(packet, kernels.encode(*pair, count, value_dtype, codec=codec))
        for mine, theirs in zip(found, kernels.unpack(packet), strict=True):
            same(mine, theirs)
    assert begin == len(message)


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
    message, sizes = kernels.encode_batch(batch, 4, "float32")
    assert isinstance(message, torch.Tensor)
    assert message.nbytes == sum(sizes)
    decoded = kernels.decode_batch(message, sizes, 4)
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
    refused("sum of 3", encode, PacketBatch(i, x, [2, 1]), 9, "1bit")
    refused(r"lengths\[1\]: got -1", encode, PacketBatch(i, x, [5, -1]), 9, "1bit")
    refused("sum of 4", kernels.decode_sum, np.ones(9, np.float32), PacketBatch(i, x[:3], [4]))
    refused("got dtype float16", encode, PacketBatch(i, x.astype(np.float16), [4]), 9, "1bit")
    refused("got 4, expected an integer in 0..3", encode, PacketBatch(i, x, [4]), 3, "1bit")
    refused("indices must ascend", encode, PacketBatch(i[::-1].copy(), x, [4]), 9, "1bit")
    refused("indices must ascend", encode, good, 3, "1bit")
    refused("got 'half'", encode, good, 9, "half")
    refused("codec: got 'raw'", encode, good, 9, "1bit", codec="raw")
    message, sizes = encode(good, 9, "1bit")
    refused("got a sum of 1 bytes", decode, message, [1], 9)
    refused("invalid sizes", decode, message, [sizes[0] + sizes[1] + 1, -1], 9)
    refused("an array of 9 elements, expected 8", decode, message, sizes, 8)
    refused("invalid packet", decode, message, [sizes[0] - 1, sizes[1] + 1], 9)
    refused("share memory", kernels.decode_sum, x, PacketBatch(i, x, [4]))
