"""Packets and dense kernels against pycomm.reference, bit by bit, on every device."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_devices import FLOATS, KINDS, TILE, made, same
from properties import SETTINGS

from pycomm import _core, kernels, reference
from pycomm.errors import InvalidArgument, Unsupported

kinds, seeds, dtypes = st.sampled_from(KINDS), st.integers(0, 2**32 - 1), st.sampled_from(FLOATS)
counts = st.sampled_from([0, 1, 63, 64, 65, TILE, 4 * TILE - 1, 4 * TILE + 1, 40_009])
factors = st.sampled_from([1.0, 1 / 3, -2.5, 0.0])


def packets_of(count, ranks, seed, kind="plain", dtype="float32"):
    """One packet of each rank: (indices, values); some are empty, some contain every element."""
    rng = np.random.default_rng(seed)
    made_up = []
    for rank in range(ranks):
        k = int(rng.choice([0, min(1, count), count // 50, count // 3, count]))
        indices = np.sort(rng.choice(count, k, replace=False)).astype(np.int32)
        made_up.append((indices, made(kind, k, seed + rank, dtype)))
    return made_up


def rounded(x, dtype):
    """The reference value for bfloat16, rounded as a store does."""
    return reference.cast(x, "bfloat16") if dtype == "bfloat16" else x


@SETTINGS
@given(
    count=counts,
    ranks=st.integers(0, 9),
    seed=seeds,
    kind=kinds,
    dtype=dtypes,
    value_dtype=dtypes,
    scale=factors,
)
def test_decode(device, count, ranks, seed, kind, dtype, value_dtype, scale):
    packets = packets_of(count, ranks, seed, kind, value_dtype)
    mine = [(device.put(i), device.put(v, value_dtype)) for i, v in packets]
    start = made("plain", count, seed, dtype)
    for (indices, values), (i, v) in zip(packets[:2], mine[:2], strict=True):
        out = kernels.scatter_add(device.put(start, dtype), i, v, scale)
        want = rounded(reference.scatter_add(start, indices, values, scale), dtype)
        same(device.get(out), want)
    if dtype == "float64":
        count = 0  # rational numbers are slow: decode_update is tested below
    out = kernels.decode_sum(device.put(np.ones_like(start), dtype), mine, scale)
    same(device.get(out), rounded(reference.decode_sum(start, packets, scale), dtype))
    if count:
        out = kernels.decode_update(device.put(start, dtype), mine, 0.1, scale)
        want = rounded(reference.decode_update(start, packets, 0.1, scale), dtype)
        same(device.get(out), want)


def some(ranks, k, low, high):
    """Indices of packets: for each rank k of those from `low` to `high`."""
    rng = np.random.default_rng(ranks + k)
    return [np.sort(rng.choice(np.arange(low, high), k, replace=False)) for _ in range(ranks)]


def stretches(ranks, low, high):
    """Indices of packets with up to 40 neighbours at once, which overlap those of other packets."""
    rng = np.random.default_rng(ranks)
    at = [rng.integers(low, high - 40, 200) for _ in range(ranks)]
    return [
        np.unique(np.concatenate([np.arange(b, b + rng.integers(1, 41)) for b in x])) for x in at
    ]


# Elements, and packets that do not spread evenly over them. The first two are large so that a GPU,
# too, has blocks with more entries than they hold at once.
SKEWED = {
    "one range": (600_000, lambda n: some(6, 1500, 7000, 9000) + some(2, 50, 0, n)),
    "one packet": (600_000, lambda n: [np.arange(5000, 12_000), *some(3, 40, 0, n)]),
    "identical": (30_011, lambda n: some(1, 700, 0, n) * 40),
    "single entries": (30_011, lambda n: some(70, 1, 0, n) + some(3, 1, n - 1, n)),
    "neighbours": (50_000, lambda n: stretches(3, 15_000, 20_000) + stretches(2, n - 400, n)),
    "everything": (30_011, lambda n: [np.arange(n)] * 5),
    "empty packets": (30_011, lambda n: some(60, 0, 0, n) + some(60, 9, 0, n) + some(60, 0, 0, n)),
    "few elements": (5, lambda n: some(500, 3, 0, n)),
}


@pytest.mark.parametrize(("dtype", "value_dtype"), [("float32", "float32"), ("float16", "float64")])
@pytest.mark.parametrize("shape", SKEWED)
def test_decode_of_skewed_packets(device, shape, dtype, value_dtype):
    count, packets_of_all = SKEWED[shape]
    packets = [
        (i.astype(np.int32), made("plain", len(i), n, value_dtype))
        for n, i in enumerate(packets_of_all(count))
    ]
    mine = [(device.put(i), device.put(v)) for i, v in packets]
    start = made("plain", count, 5, dtype)
    out = kernels.decode_sum(device.put(np.ones_like(start)), mine, 1 / 3)
    same(device.get(out), reference.decode_sum(start, packets, 1 / 3))
    out = kernels.decode_update(device.put(start), mine, 0.1, 1 / 3)
    same(device.get(out), reference.decode_update(start, packets, 0.1, 1 / 3))


def test_decode_update_of_float64(device):
    packets = packets_of(300, 4, 3, "odd ones", "float64")
    start = made("tiny", 300, 4, "float64")
    mine = [(device.put(i), device.put(v)) for i, v in packets]
    out = kernels.decode_update(device.put(start), mine, 0.3, 1 / 7)
    same(device.get(out), reference.decode_update(start, packets, 0.3, 1 / 7))


def test_decode_through_a_list_of_arrays(device):
    """Indices count through all arrays, with boundaries anywhere."""
    sizes = [5, 0, 4 * TILE + 3, 1, 20_000]
    count = sum(sizes)
    packets = packets_of(count, 3, 11)
    packets.append((np.arange(count, dtype=np.int32), made("plain", count, 13)))
    mine = [(device.put(i), device.put(v)) for i, v in packets]
    start = made("plain", count, 12)
    ends = np.cumsum(sizes)[:-1]
    params = [device.put(x) for x in np.split(start, ends)]
    assert kernels.decode_update(params, mine, 0.1, 1 / 3) is params
    want = reference.decode_update(start, packets, 0.1, 1 / 3)
    same(np.concatenate([device.get(x) for x in params]), want)
    kernels.decode_sum(params, mine)
    same(np.concatenate([device.get(x) for x in params]), reference.decode_sum(start, packets))


@SETTINGS
@given(
    count=counts, seed=seeds, kind=kinds, dtype=st.sampled_from(["float32", "float64"]), sent=dtypes
)
def test_encode(device, count, seed, kind, dtype, sent):
    indices, values = packets_of(count, 1, seed, kind, dtype)[0]
    rest = made("plain", count, seed, dtype)
    residual = device.put(rest)
    packet = kernels.encode(device.put(indices), device.put(values), count, sent, residual)
    want, lost = reference.encode(indices, values, count, sent, rest)
    assert device.get(packet).tobytes() == want
    assert len(want) == kernels.packet_bytes(len(indices), sent)
    same(device.get(residual), lost)
    places, numbers = kernels.unpack(packet_as_torch(device, packet, sent), value_dtype=sent)
    same(device.get(places), reference.unpack(want)[0])
    same(device.get(numbers), reference.unpack(want)[1])
    decoded = [
        kernels.decode_sum(device.put(rest), p, value_dtype=v)
        for p, v in [([packet, packet], sent), ([(places, numbers)] * 2, "float32")]
    ]
    same(device.get(decoded[0]), device.get(decoded[1]))


def packet_as_torch(device, packet, sent):
    """NumPy alone has no bfloat16 to view bytes as."""
    return device.put(device.get(packet), torch_too=True) if sent == "bfloat16" else packet


@SETTINGS
@given(count=counts, seed=seeds, kind=kinds, dtype=dtypes)
def test_norm_and_clip(device, count, seed, kind, dtype):
    if dtype == "float64":
        count = min(count, 65)  # rational numbers are slow
    x = made(kind, count, seed, dtype)
    mine = device.put(x, dtype)
    same(device.get(kernels.norm(mine)), reference.norm(x))
    for limit in (0.0, 1.0, 1e30):
        clipped = kernels.clip_(device.put(x, dtype), limit)
        same(device.get(clipped), rounded(reference.clip(x, limit), dtype))


def test_norm_of_many_tiles_and_of_lists(device):
    sizes = [0, 1, 130 * TILE + 77, TILE]
    xs = [made("plain", n, n) for n in sizes]
    found = kernels.norm([device.put(x) for x in xs])
    same(device.get(found), np.concatenate([reference.norm(x) for x in xs]))
    same(device.get(kernels.norm(found)), reference.norm(device.get(found)))
    scales = kernels.clip_scale(found, 2.0, 0.5)
    same(device.get(scales), reference.clip_scale(device.get(found), 2.0, 0.5))


def test_clip_scale_of_norms_that_do_not_clip(device):
    norms = np.array([0, np.nan, np.inf, 1, 4, 1e-300])
    want = np.array([3, 3, 3, 3, 1.5, 3], np.float32)
    same(device.get(kernels.clip_scale(device.put(norms), 2.0, 3.0)), want)


@SETTINGS
@given(seed=seeds, dtype=dtypes, to=dtypes)
def test_cast(device, seed, dtype, to):
    """Any bits of float32 and numbers near the midpoint between two of the narrow dtype."""
    rng = np.random.default_rng(seed)
    any_bits = rng.integers(0, 2**32, 500, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        narrow = reference.cast(any_bits, to if to != "float64" else "float32").astype(np.float64)
        up = np.nextafter(narrow.astype(np.float32), np.float32(np.inf)).astype(np.float64)
        middle = (narrow + up) / 2 * (1 + rng.choice([0, 2**-40, -(2**-40)], 500))
        x = reference.cast(np.concatenate([any_bits, middle, middle * 65536]), dtype)
    mine = device.put(x, dtype, torch_too=to == "bfloat16")
    same(device.get(kernels.cast(mine, to)), reference.cast(x, to))


def test_cast_of_half_numbers_in_float64(device):
    """Just above and below the midpoint of two float16: double rounding would give the even one."""
    half = np.arange(0, 31 << 10, 7, dtype=np.uint16).view(np.float16)
    above = np.nextafter(half, np.float16(np.inf))
    with np.errstate(all="ignore"):
        middle = (half.astype(np.float64) + above) / 2
        x = np.concatenate([middle, middle * (1 + 1e-12), middle * (1 - 1e-12)])
        want = x.astype(np.float16)
    same(device.get(kernels.cast(device.put(x), "float16")), want)


@pytest.mark.parametrize("dtype", _core.DTYPES)
@pytest.mark.parametrize("op", _core.REDUCE_OPS)
def test_reduce(device, dtype, op):
    """Every valid pair; out may be one of the operands."""
    rng = np.random.default_rng(3)
    floats = dtype in FLOATS
    if (floats and op.startswith("b")) or (not floats and op == "avg"):
        with pytest.raises(Unsupported, match="not defined"):
            kernels.reduce_(
                *[device.put(np.ones(3), dtype)] * 1, [device.put(np.ones(3), dtype)], op
            )
        return
    for ranks, count in [(1, 70), (2, 1000), (3, 70_000), (8, 65)]:
        if floats:
            xs = [made("odd ones", count, rank, dtype) for rank in range(ranks)]
        else:
            xs = [rng.integers(0, 2 if dtype == "bool" else 100, count) for _ in range(ranks)]
            xs = [x.astype(dtype) for x in xs]
        want = reference.reduce(xs, op)
        for own in (None, 0, ranks - 1):
            mine = [device.put(x, dtype) for x in xs]
            out = device.put(np.zeros(count), dtype) if own is None else mine[own]
            assert kernels.reduce_(out, mine, op) is out
            same(device.get(out), rounded(want, dtype))


def test_momentum_mask(device):
    u, v = made("odd ones", 900, 1), made("plain", 900, 2)
    indices = np.array([0, 5, 6, 899], np.int32)
    mine = device.put(u), device.put(v)
    kernels.momentum_mask(*mine, device.put(indices))
    for got, want in zip(mine, reference.momentum_mask(u, v, indices), strict=True):
        same(device.get(got), want)
    kernels.momentum_mask(None, mine[1], device.put(np.array([1], np.int32)))
    assert device.get(mine[1])[1] == 0


@pytest.mark.parametrize("bad", [[3, 2], [1, 1], [-1, 2], [2, 100]])
def test_invalid_indices_of_other_programs(device, bad):
    """Out of range or out of order: rejected before anything changes, if that is detectable."""
    if not device.indices_are_checked:
        return
    indices, good = (device.put(np.array(i, np.int32)) for i in (bad, [0, 1]))
    values = device.put(np.ones(2, np.float32))
    x, u = (device.put(np.ones(100, np.float32)) for _ in range(2))
    packets = [(good, values), (indices, values)]
    for call in (
        lambda: kernels.scatter_add(x, indices, values),
        lambda: kernels.decode_sum(x, packets),
        lambda: kernels.decode_update(x, packets, 0.1),
        lambda: kernels.momentum_mask(x, None, indices),
        lambda: kernels.dgc_rollback(u, x, indices, values, values),
        lambda: kernels.encode(indices, values, 100, residual=x),
    ):
        with pytest.raises(InvalidArgument, match="ascend"):
            call()
        same(device.get(x), np.ones(100, np.float32))


@SETTINGS
@given(data=st.binary(max_size=80), flips=st.lists(st.integers(0, 63), max_size=3))
def test_arbitrary_bytes_unpack_or_raise(data, flips):
    """Any bytes, and a valid packet with a few bytes changed: a value or InvalidArgument."""
    indices, values = np.arange(4, dtype=np.int32), np.ones(4, np.float32)
    packet = bytearray(kernels.encode(indices, values, 10).tobytes())
    for place in flips:
        packet[place] ^= 0x41
    for some in (data, bytes(packet)):
        array = np.frombuffer(some, np.uint8)
        try:
            places, _ = kernels.unpack(array)
            assert len(places) <= 10
            kernels.decode_sum(np.zeros(10, np.float32), [array])
        except InvalidArgument:  # allowed; any other error fails the test
            pass
