"""Compact packets on every device: the bytes of pycomm.reference.compact. Arbitrary bytes are
rejected exactly where the CPU rejects them.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_devices import made, same
from properties import SETTINGS
from test_compact import CASES, CODECS, MOST, SHAPES, VALUES, indices_of, uniform

from pycomm import _core, kernels
from pycomm._core_api.arrays import as_array_ref
from pycomm.errors import InvalidArgument
from pycomm.kernels import compact
from pycomm.reference import compact as reference_compact

seeds = st.integers(0, 2**32 - 1)
counts = st.sampled_from([1, 2, 63, 64, 65, 2048, 2049, 4097, 9001])


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


@SETTINGS
@given(count=counts, **CASES)
def test_bits(device, count, shape, seed, kind, dtype, value_code, codec):
    indices = indices_of(shape, count, seed)
    values, rest = made(kind, len(indices), seed, dtype), made("plain", count, 5, dtype)
    want, left = reference_compact.encode(
        indices, values, count, value_code, rest, index_code=codec
    )
    places, numbers, residual = (device.put(x) for x in (indices, values, rest))
    packet = kernels.encode(places, numbers, count, value_code, residual, codec=codec)
    assert device.get(packet).tobytes() == want
    same(device.get(residual), left)
    for found, wanted in zip(
        kernels.unpack(packet, codec=codec), reference_compact.unpack(want), strict=True
    ):
        same(device.get(found), wanted)


@pytest.mark.parametrize("codec", ["auto", "list", "rice"])
def test_indices_up_to_the_largest(device, codec):
    near = MOST - 1 - np.arange(70)[::-1]
    for wide in ([0, MOST - 1], near, np.append(np.arange(200), MOST - 1), uniform(MOST // 2, 99)):
        indices = np.asarray(wide).astype(np.int32)
        values = np.ones(len(indices), np.float32)
        packet = kernels.encode(device.put(indices), device.put(values), MOST, "1bit", codec=codec)
        want, _ = reference_compact.encode(indices, values, MOST, "1bit", index_code=codec)
        assert device.get(packet).tobytes() == want
        places, _, refused = unpacked(device, np.frombuffer(want, np.uint8), len(indices), MOST)
        assert not refused
        same(places, indices)


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
