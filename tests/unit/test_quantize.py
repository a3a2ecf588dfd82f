"""Quantized arrays: the kernels against pycomm.reference, bit by bit, and their promises."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_devices import INSTRUCTION_SETS, KINDS, Cpu, made, same
from properties import SETTINGS

from pycomm import _core, kernels, reference
from pycomm._core_api import arrays
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.kernels import quantized

BITS = (1, 2, 3, 4, 8)
COUNTS = (0, 1, 7, 8, 9, 63, 127, 129, 4095, 4096, 4097, 3 * 4096 + 17, 70_001)
DEVICE = Cpu()


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request):
    before = _core.kernel_isa()
    _core.set_kernel_isa(request.param)
    yield request.param
    _core.set_kernel_isa(before)


def compare(x, residual, bits, dtype="float32", device=DEVICE):
    wanted, lost = reference.quantize(x, bits, residual)
    mine = None if residual is None else device.put(residual.copy())
    packet = kernels.quantize(device.put(x, dtype), bits, mine)
    same(device.get(packet), np.frombuffer(wanted, np.uint8))
    if mine is not None:
        same(device.get(mine), lost)
    out = kernels.dequantize(packet, bits, device.put(np.empty(x.size, np.float32)))
    same(device.get(out), reference.dequantize(wanted, x.size, bits))


CASES = {
    "kind": st.sampled_from(KINDS),
    "seed": st.integers(0, 2**32 - 1),
    "bits": st.sampled_from(BITS),
    "dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
    "feedback": st.booleans(),
}


@SETTINGS
@given(count=st.sampled_from(COUNTS), **CASES)
def test_quantize_equals_the_reference(isa, count, kind, seed, bits, dtype, feedback):
    x = made(kind, count, seed, dtype)
    compare(x, made("plain", count, seed + 1, "float32") if feedback else None, bits, dtype)


@settings(SETTINGS, max_examples=30)
@given(count=st.sampled_from([0, 1, 9, 127, 129, 4096, 2 * 4096 + 17]), **CASES)
def test_devices_equal_the_reference(device, count, kind, seed, bits, dtype, feedback):
    x = made(kind, count, seed, dtype)
    residual = made("plain", count, seed + 1, "float32") if feedback else None
    compare(x, residual, bits, dtype, device)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bits", BITS)
def test_devices_decode_any_bytes(device, bits, dtype):
    """Also levels that are not finite, with a scale and a sum in the output."""
    rng = np.random.default_rng(bits)
    for count in (1, 4096, 5000):
        size = kernels.quantized_bytes(count, bits)
        packet = rng.integers(0, 256, size, np.uint8)
        before = reference.cast(rng.standard_normal(count).astype(np.float32), dtype)
        out = device.put(before, dtype)
        with np.errstate(all="ignore"):
            decoded = np.float32(1 / 3) * reference.dequantize(packet.tobytes(), count, bits)
            wanted = reference.cast(before.astype(np.float32) + decoded, dtype)
        found = kernels.dequantize(device.put(packet), bits, out, accumulate=True, scale=1 / 3)
        same(device.get(found).astype(np.float32), wanted.astype(np.float32))
    finite = np.ones(100, np.float32)
    for x in (finite, np.where(np.arange(100) == 50, np.inf, finite).astype(np.float32)):
        packet = kernels.quantize(device.put(x), bits)
        into = device.put(finite)
        assert quantized.decode(packet, bits, into) == np.isfinite(x).all()


def test_devices_read_blocks_of_an_array(device):
    """In another order than in memory, in two launches, and with another array for what is lost."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal(9100).astype(np.float32)
    counts = np.array([1000, *[1] * 2700, 2400])
    offsets = np.concatenate([[8000], np.arange(2700) * 2, [5500]])
    blocks = quantized.Blocks(offsets, counts)
    residual, lost = device.put(np.ones_like(x)), device.put(np.zeros_like(x))
    packet = quantized.encode(device.put(x), 4, residual, lost=lost, blocks=blocks)
    wanted, rest = b"", np.zeros_like(x)
    for offset, count in zip(offsets.tolist(), counts.tolist(), strict=True):
        part = x[offset : offset + count]
        coded, rest[offset : offset + count] = reference.quantize(part, 4, np.ones_like(part))
        wanted += coded
    same(device.get(packet), np.frombuffer(wanted, np.uint8))
    same(device.get(lost), rest)
    same(device.get(residual), np.ones_like(x))


@SETTINGS
@given(
    words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70), bits=st.sampled_from(BITS)
)
def test_any_values(isa, words, bits):
    """NaN of every payload, infinities, subnormals."""
    x = np.array(words, np.uint32).view(np.float32)
    compare(x, np.zeros_like(x), bits)


@SETTINGS
@given(
    count=st.sampled_from([1, 9, 4096, 5000]),
    seed=st.integers(0, 2**32 - 1),
    bits=st.sampled_from(BITS),
    scale=st.sampled_from([1.0, 1 / 3]),
    accumulate=st.booleans(),
)
def test_any_bytes_decode(isa, count, seed, bits, scale, accumulate):
    rng = np.random.default_rng(seed)
    packet = rng.integers(0, 256, kernels.quantized_bytes(count, bits), np.uint8)
    out = rng.standard_normal(count).astype(np.float32)
    with np.errstate(all="ignore"):
        wanted = np.float32(scale) * reference.dequantize(packet.tobytes(), count, bits)
        wanted = reference.cast(out + wanted if accumulate else wanted, "float32")
    same(kernels.dequantize(packet, bits, out, accumulate=accumulate, scale=scale), wanted)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_makes_its_block_nan(bits, bad):
    x = np.random.default_rng(1).standard_normal(3 * 4096).astype(np.float32)
    x[5000] = bad
    residual = np.random.default_rng(2).standard_normal(x.size).astype(np.float32)
    before = residual.copy()
    packet = kernels.quantize(x, bits, residual)
    out = kernels.dequantize(packet, bits, np.empty_like(x))
    assert np.isnan(out[4096:8192]).all()
    assert np.isfinite(np.delete(out, np.s_[4096:8192])).all()
    same(residual[4096:8192], before[4096:8192])
    assert (residual[:4096] != before[:4096]).any()
    assert not quantized.decode(packet, bits, out)
    assert quantized.decode(kernels.quantize(before, bits), bits, out)


@pytest.mark.parametrize("bits", BITS)
def test_feedback_conserves_the_sum(bits):
    """Sent values plus the residual are the sum of all inputs."""
    rng = np.random.default_rng(3)
    residual, sent, given_ = np.zeros(9000, np.float32), np.zeros(9000), np.zeros(9000)
    for _ in range(20):
        x = rng.laplace(size=9000).astype(np.float32)
        packet = kernels.quantize(x, bits, residual)
        sent += kernels.dequantize(packet, bits, np.empty_like(x))
        given_ += x
    np.testing.assert_allclose(sent + residual, given_, atol=1e-4)


def error(bits, x):
    packet = kernels.quantize(x, bits)
    lost = x - kernels.dequantize(packet, bits, np.empty_like(x))
    return float((lost**2).sum() / (x**2).sum())


def test_most_that_is_lost():
    """Of the squares of values with a Laplace distribution."""
    x = np.random.default_rng(4).laplace(size=40 * 4096).astype(np.float32)
    for bits, most in ((1, 0.52), (2, 0.2), (3, 0.2), (4, 0.06), (8, 0.0005)):
        assert error(bits, x) < most


@pytest.mark.parametrize("bits", BITS)
def test_sizes(bits):
    assert kernels.quantized_bytes(0, bits) == 0
    block = (2 if bits == 1 else 4) + 512 * bits
    assert kernels.quantized_bytes(4096, bits) == block
    assert kernels.quantized_bytes(2 * 4096 + 9, bits) == 2 * block + (2 if bits == 1 else 4) + -(
        -9 * bits // 8
    )


def test_threads_do_not_matter():
    x = np.random.default_rng(6).standard_normal(300_000).astype(np.float32)
    before, results = _core.kernel_threads(), []
    for threads in (1, 3):
        _core.set_kernel_threads(threads)
        residual = np.zeros_like(x)
        packet = kernels.quantize(x, 3, residual)
        results.append((packet, residual, kernels.dequantize(packet, 3, np.empty_like(x))))
    _core.set_kernel_threads(before)
    for one, other in zip(*results, strict=True):
        same(one, other)


def test_wrong_arguments():
    x = np.ones(10, np.float32)
    for call in (
        lambda: kernels.quantize(x, 5),
        lambda: kernels.quantize(x, True),
        lambda: kernels.quantize(x.astype(np.float64), 3),
        lambda: kernels.quantize(x, 3, x),
        lambda: kernels.quantize(x, 3, np.zeros(9, np.float32)),
        lambda: kernels.quantize(x, 3, out=np.zeros(9, np.uint8)),
        lambda: kernels.dequantize(np.zeros(9, np.uint8), 3, x),
        lambda: kernels.dequantize(np.zeros(8, np.uint8), 3, x, scale=np.inf),
        lambda: kernels.quantized_bytes(-1, 3),
        lambda: quantized.encode(x, 3, blocks=quantized.Blocks([0], [11])),
        lambda: quantized.Blocks([0, 4], [5, 1]),
        lambda: quantized.Blocks([0], [4097]),
        lambda: quantized.Blocks([-1], [4]),
        lambda: quantized.Blocks([3], [0]),
    ):
        with pytest.raises(InvalidArgument):
            call()
    assert (x == 1).all()


def test_other_devices_are_refused():
    with pytest.raises(Unsupported):
        kernels.quantize(torch.ones(10, device="meta"), 3)
    of_cupy = arrays.ArrayRef(0, "float32", 3, (3,), arrays.Device("cuda", 0), object())
    with pytest.raises(Unsupported, match=r"torch\.as_tensor"):
        quantized.check_array(of_cupy, "all_reduce with compression")


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_values_decode_to_finite_ones(bits):
    most = np.finfo(np.float32).max
    x = np.array([most, -most, 0.9 * most, 0, 1], np.float32)
    wanted, lost = reference.quantize(x, bits)
    assert np.isfinite(lost).all()
    assert np.isfinite(reference.dequantize(wanted, x.size, bits)).all()
    compare(x, np.zeros(x.size, np.float32), bits)
