"""Compact packets on every device: the bytes of pycomm.reference.compact, and their size. Arbitrary
bytes are rejected exactly where the CPU rejects them."""

from math import lgamma, log
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_devices import DEVICES, KINDS, Cpu, made, same
from properties import SETTINGS

from pycomm import _core, kernels, reference
from pycomm._core_api.arrays import as_array_ref
from pycomm.errors import InvalidArgument
from pycomm.kernels import compact
from pycomm.reference import compact as reference_compact

CODECS = ("auto", *reference_compact.INDEX_CODES)
VALUES = reference_compact.VALUE_CODES
SHAPES = ("none", "first", "last", "all", "some", "half", "clustered")
MOST = 2**31 - 1

seeds = st.integers(0, 2**32 - 1)
counts = st.sampled_from([1, 2, 63, 64, 65, 257, 2048, 2049, 4096, 4097, 9001])
# All properties of a packet except the number of parameters.
CASES: dict[str, st.SearchStrategy[Any]] = {
    "shape": st.sampled_from(SHAPES),
    "seed": seeds,
    "kind": st.sampled_from(KINDS),
    "dtype": st.sampled_from(["float32", "float64"]),
    "value_code": st.sampled_from(VALUES),
    "codec": st.sampled_from(CODECS),
}


@pytest.fixture(params=["baseline", *DEVICES], scope="module")
def device(request):
    """That of conftest.py, also on the CPU without its instruction sets."""
    before = _core.kernel_isa()
    if request.param == "baseline":
        _core.set_kernel_isa("baseline")
    with DEVICES.get(request.param, Cpu)() as found:
        yield found
    _core.set_kernel_isa(before)


def indices_of(shape, count, seed):
    rng = np.random.default_rng(seed)
    chosen = np.zeros(count, bool)
    if shape == "clustered":
        chosen = rng.random(count) < np.repeat(rng.random(-(-count // 90)) ** 6, 90)[:count]
    elif shape in ("some", "half"):
        chosen = rng.random(count) < (0.5 if shape == "half" else 0.02)
    chosen[{"first": slice(1), "last": slice(-1, None), "all": slice(None)}.get(shape, [])] = True
    return np.flatnonzero(chosen).astype(np.int32)


def uniform(count, k, seed=0):
    """k of count, all sets with equal probability."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(count, k, replace=False)).astype(np.int32)


def unpacked(device, packet, k, count):
    """(indices, values, whether they were rejected)."""
    there = device.put(packet)
    row = as_array_ref(there, "packet").pointer, packet.size, k, 0, count
    try:
        made = compact.decode([row], as_array_ref(there, "packet"))
    except InvalidArgument:  # only devices that check
        assert device.indices_are_checked
        return np.full(k, -1, np.int32), np.zeros(k, np.float32), True
    return device.get(made[0]), device.get(made[1]), bool(device.get(made[2])[0])


def check(device, indices, values, count, value_code, codec):
    """Encoder and decoder agree with the reference; a residual is included where memory allows."""
    rest = left = None
    if count < 10**6:
        rest = made("plain", count, 5, values.dtype.name)
    want, left = reference_compact.encode(
        indices, values, count, value_code, rest, index_code=codec
    )
    own = None if rest is None else device.put(rest)
    pair = device.put(indices), device.put(values)
    packet = kernels.encode(*pair, count, value_code, own, codec=codec)
    assert device.get(packet).tobytes() == want
    if rest is not None:
        same(device.get(own), left)
    assert len(want) <= kernels.packet_bytes(len(indices), value_code, codec=codec, count=count)
    found = [device.get(x) for x in kernels.unpack(packet, codec=codec)]
    for got, wanted in zip(found, reference_compact.unpack(want), strict=True):
        same(got, wanted)
    same(found[0], indices)


@SETTINGS
@given(count=counts, **CASES)
def test_bits(device, count, shape, seed, kind, dtype, value_code, codec):
    indices = indices_of(shape, count, seed)
    check(device, indices, made(kind, len(indices), seed, dtype), count, value_code, codec)


@pytest.mark.parametrize("codec", ["auto", "list", "rice"])
def test_indices_up_to_the_largest(device, codec):
    """Gaps of up to 2^31 - 2, alone and beside small ones."""
    ends = np.array([0, MOST - 1], np.int64)
    near = MOST - 1 - np.arange(70)[::-1]
    for wide in (ends[1:], ends, near, np.append(np.arange(200), MOST - 1), uniform(MOST // 2, 99)):
        indices = np.asarray(wide).astype(np.int32)
        check(device, indices, np.ones(len(indices), np.float32), MOST, "1bit", codec)


def test_the_largest_magnitudes_stay_finite(device):
    """A level that is rounded up never becomes infinity."""
    largest = np.float32(np.finfo(np.float32).max)
    indices, values = np.arange(3, dtype=np.int32), np.array([1, -1, 0.5], "f4") * largest
    for value_code in VALUES[2:]:
        check(device, indices, values, 3, value_code, "auto")
        found = kernels.unpack(kernels.encode(indices, values, 3, value_code, codec="auto"))[1]
        assert np.isfinite(found).all()
        assert np.abs(found[:2]).min() > 0.6 * largest


@pytest.mark.parametrize("value_code", VALUES)
def test_nothing_is_lost_over_steps(value_code):
    """Sent values and residual sum to all gradients, up to rounding."""
    rng = np.random.default_rng(7)
    count, k, steps = 5000, 400, 30
    rest, sent, total = (np.zeros(count, np.float32) for _ in range(3))
    for _ in range(steps):
        gradient = rng.laplace(size=count).astype(np.float32)
        total += gradient
        rest += gradient
        indices, values = kernels.topk(rest, k)
        rest[indices] = 0
        packet = kernels.encode(indices, values, count, value_code, rest, codec="auto")
        np.add.at(sent, *kernels.unpack(packet))
    assert np.abs(sent + rest - total).max() < 1e-5 * np.abs(total).max()
    left = np.linalg.norm(rest) / np.linalg.norm(total)
    assert left < {"2bit": 0.75, "1bit": 0.75}.get(value_code, 0.7)


def test_packets_decode_as_pairs_do():
    """decode_sum and decode_update of compact, raw and unpacked packets together."""
    count = 9001
    lists = [(indices_of("some", count, s), made("plain", 10_000, s)) for s in range(4)]
    pairs = [(i, v[: len(i)]) for i, v in lists]
    codecs = ["auto", "rice", "raw", "bitmap"]
    packets = [kernels.encode(*p, count, codec=c) for p, c in zip(pairs, codecs, strict=True)]
    start = made("plain", count, 9)
    same(kernels.decode_sum(start.copy(), packets, 0.25), reference.decode_sum(start, pairs, 0.25))
    want = reference.decode_update(start, pairs, 0.1, 0.25)
    same(kernels.decode_update(start.copy(), [*packets[:3], pairs[3]], 0.1, 0.25), want)
    same(kernels.decode_update(start.copy(), packets, 0.1, 0.25), want)


def test_torch_inputs_give_torch_outputs():
    indices, values = torch.tensor([2, 7], dtype=torch.int32), torch.tensor([1.5, -1.5])
    packet = kernels.encode(indices, values, 9, "1bit", codec="auto")
    assert isinstance(packet, torch.Tensor)
    places, numbers = kernels.unpack(packet)
    assert torch.equal(places, indices)
    assert torch.equal(numbers, values)
    read = kernels.unpack(packet.numpy().tobytes())
    assert [x.tolist() for x in read] == [[2, 7], [1.5, -1.5]]


def entropy_bits(count, k):
    """Bits of an index if all sets of k have equal probability: log2 C(count, k) / k."""
    return (lgamma(count + 1) - lgamma(k + 1) - lgamma(count - k + 1)) / log(2) / k


@pytest.mark.parametrize("sparsity", [0.75, 0.9375, 0.984375, 0.996, 0.999, 0.9999])
def test_index_bits(sparsity):
    """Within 2 % of the entropy, without values and the header's 11 bytes."""
    count = 2**22
    k = round(count * (1 - sparsity))
    packet = kernels.encode(uniform(count, k), np.ones(k, np.float32), count, codec="auto")
    assert 8 * (packet.nbytes - 11 - 4 * k) / k <= 1.02 * entropy_bits(count, k)


@pytest.mark.parametrize(
    ("value_code", "count", "most"),
    [("2bit", 10**6, 1.72), ("1bit", 10**6, 1.60), ("3bit", 10**6, 1.85), ("2bit", 64_000, 1.21)],
)
def test_bytes_of_a_kept_element(value_code, count, most):
    """Headers included, for 1000 kept elements: the worst of 20 such sets."""
    values = made("plain", 1000, 1)
    nbytes = [
        kernels.encode(uniform(count, 1000, seed), values, count, value_code, codec="auto").nbytes
        for seed in range(20)
    ]
    assert max(nbytes) / 1000 <= most


def test_the_shortest_code_is_chosen():
    def nbytes(indices, count, codec):
        values = np.ones(len(indices), np.float32)
        packet = kernels.encode(indices, values, count, codec=codec)
        return packet.nbytes, reference_compact.INDEX_CODES[packet[3] & 15]

    cases = [(indices_of(shape, 4096, 3), 4096) for shape in ("none", "some", "clustered", "all")]
    cases.append((np.array([MOST - 1], np.int32), MOST))
    chosen = []
    for indices, count in cases:
        codes = CODECS[1:] if count < MOST else ("list", "rice")
        size, code = nbytes(indices, count, "auto")
        assert size == min(nbytes(indices, count, code)[0] for code in codes)
        chosen.append(code)
    assert chosen == ["list", "rice", "rice", "list", "list"]  # of all: no indices


def test_wrong_arguments():
    indices, values = np.array([1, 5], np.int32), np.ones(2, np.float32)
    rest = np.ones(9, np.float32)
    for call, message in [
        (lambda: kernels.encode(indices, values, 9, codec="zip"), "one of raw, auto"),
        (lambda: kernels.encode(indices, values, 9, "2bit"), "with codec='raw'"),
        (lambda: kernels.encode(indices, values, 9, "float16", codec="auto"), "one of float32"),
        (lambda: kernels.encode(indices, values, 5, "1bit", rest[:5], codec="auto"), "ascend"),
        (lambda: kernels.encode(indices[::-1].copy(), values, 9, "1bit", rest, codec="rice"),
         "ascend"),
        (lambda: kernels.encode(indices, values, 9, codec="list", out=np.zeros(9, np.uint8)),
         "shape"),
        (lambda: kernels.decode_sum(rest, [kernels.encode(indices, values, 8, codec="auto")]),
         "array of 8 elements"),
        (lambda: kernels.unpack(np.frombuffer(b"PL\2\0\0\0\0", np.uint8)), "version"),
        (lambda: kernels.unpack(np.frombuffer(b"PL\1\x50\0\0\0", np.uint8)), "codec"),
    ]:  # fmt: skip
        with pytest.raises(InvalidArgument, match=message):
            call()
        same(rest, np.ones(9, np.float32))


@pytest.mark.parametrize(
    ("value_code", "spare_of_values"), [("1bit", range(19, 24)), ("3bit", range(41, 48))]
)
def test_padding_bits_are_zero(value_code, spare_of_values):
    """Of values, quotients, remainders and bitmaps: a packet has no unused bits."""
    indices, values = np.array([3, 40, 90], np.int32), np.ones(3, np.float32)
    for codec in ("rice", "bitmap"):
        packet = kernels.encode(indices, values, 100, value_code, codec=codec)
        spare = []
        for i in range(8 * len(packet)):
            changed = packet.copy()
            changed[i // 8] ^= 1 << i % 8
            try:
                kernels.unpack(changed)
            except InvalidArgument:  # invalid packet; counted
                spare.append(i)
        start = 8 * (5 + 1 + 1)  # of the values
        assert {start + bit for bit in spare_of_values} <= set(spare)
        assert 8 * len(packet) - 1 in spare


def test_a_buffer_of_the_caller(device):
    """Bytes after the packet do not change."""
    indices, values = indices_of("some", 9001, 1), made("plain", 9001, 2)
    values = values[: len(indices)]
    want, _ = reference_compact.encode(indices, values, 9001, "2bit")
    most = kernels.packet_bytes(len(indices), "2bit", codec="auto", count=9001)
    out = device.put(np.full(most, 9, np.uint8))
    pair = device.put(indices), device.put(values)
    packet = kernels.encode(*pair, 9001, "2bit", codec="auto", out=out)
    assert device.get(packet).tobytes() == want
    assert device.get(out)[: len(want)].tobytes() == want
    assert (device.get(out)[len(want) :] == 9).all()


@SETTINGS
@given(
    seed=seeds,
    shape=st.sampled_from(SHAPES),
    flips=st.lists(seeds, max_size=3),
    longer=st.integers(-3, 2),
    off=st.integers(-1, 1),
)
def test_arbitrary_bytes_decode_or_raise(device, seed, shape, flips, longer, off):
    """Rejected exactly where the CPU does; otherwise the same indices and values."""
    count = 900
    indices = indices_of(shape, count, seed)
    values = np.ones(len(indices), np.float32)
    packet, _ = reference_compact.encode(
        indices, values, count, VALUES[seed % len(VALUES)], index_code=CODECS[seed % 4]
    )
    corrupted = np.frombuffer(
        packet[: len(packet) + min(longer, 0)] + bytes(max(longer, 0)), np.uint8
    )
    corrupted = corrupted.copy()
    for place in flips:
        corrupted[place % len(corrupted)] ^= 1 << place % 8
    k = max(0, len(indices) + off)
    try:
        found = _core.read_packet_header(corrupted.ctypes.data, corrupted.size)
        here = np.empty(k, np.int32), np.empty(k, np.float32), np.empty(1, np.int32)
        pointers = [x.ctypes.data for x in here]
        fits = (k, count) == found[:2]
        row = np.array([corrupted.ctypes.data, corrupted.size, k, 0, count], np.uint64)
        _core.kernels.decode_compact((row.ctypes.data, 1), 1, *pointers, (0, 0), 0, 0)
        assert fits
        wanted = here[0], here[1], False
    except InvalidArgument:  # the device must reject it too
        wanted = np.full(k, -1, np.int32), np.zeros(k, np.float32), True
    places, numbers, refused = unpacked(device, corrupted, k, count)
    assert refused == wanted[2]
    same(places, wanted[0])
    same(numbers, wanted[1])
    if device.indices_are_checked:
        out = np.zeros(count, np.float32)
        try:
            kernels.decode_sum(out, [corrupted])
        except InvalidArgument:  # rejected: nothing may have changed
            same(out, np.zeros(count, np.float32))


def rice_packet(k, count, parameters):
    """Indices 0 to k - 1, so that quotients and remainders are zeros, with these parameters."""
    start = max(1, (count * 45426 // k) >> 16).bit_length() - 1
    steps = np.diff(parameters, prepend=start)
    zeros = np.where(steps > 0, 2 * steps - 1, -2 * steps)
    unary = [bit for n in (*zeros, *[0] * k) for bit in (*[0] * n, 1)]
    widths = np.repeat(parameters, 64)[:k]
    every, ones = np.arange(k, dtype=np.int32), np.ones(k, np.float32)
    whole, _ = reference_compact.encode(every, ones, count, "1bit", index_code="list")
    head = whole[: -4 * k]
    codes = head[3] & 0xF0 | reference_compact.INDEX_CODES.index("rice")
    body = np.packbits(unary, bitorder="little").tobytes() + bytes(-(-int(widths.sum()) // 8))
    return np.frombuffer(head[:3] + bytes([codes]) + head[4:] + body, np.uint8)


@pytest.mark.parametrize("before", [[], [24], [24, 3]])
def test_parameter_above_the_maximum_is_rejected(device, before):
    """The maximum is 30; a packet with 31 is otherwise as valid as one with 30."""
    k = 64 * len(before) + 1
    for last, sound in ((30, True), (31, False)):
        packet = rice_packet(k, MOST, [*before, last])
        indices, values, refused = unpacked(device, packet, k, MOST)
        assert refused != sound
        same(indices, np.arange(k, dtype=np.int32) if sound else np.full(k, -1, np.int32))
        same(values, np.full(k, sound, np.float32))


@pytest.mark.parametrize("bad", [[3, 2], [1, 1], [-1, 2], [2, 100]])
def test_wrong_indices_are_rejected(device, bad):
    """Before anything changes."""
    indices, values = device.put(np.array(bad, np.int32)), device.put(np.ones(2, np.float32))
    rest = device.put(np.ones(100, np.float32))
    with pytest.raises(InvalidArgument, match=r"0\.\.99"):
        kernels.encode(indices, values, 100, "1bit", rest, codec="auto")
    same(device.get(rest), np.ones(100, np.float32))


def test_packet_header_in_device_memory():
    """The first bytes suffice; the length in them must match that of the whole packet."""
    indices, values = indices_of("some", 9001, 1), made("plain", 9001, 2)
    packet, _ = reference_compact.encode(indices, values[: len(indices)], 9001, "2bit")
    whole = as_array_ref(np.frombuffer(packet, np.uint8), "packet")
    assert compact.header(whole) == (len(indices), 9001)
    for wrong in (packet[:9], packet + bytes(9999), b"no" + packet[2:]):
        with pytest.raises(InvalidArgument, match="invalid packet"):
            compact.header(as_array_ref(np.frombuffer(wrong, np.uint8), "packet"))
