"""The update step against pycomm.reference, bit by bit, its packets and its rollback."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_devices import INSTRUCTION_SETS, KINDS, Cpu, made, same
from properties import SETTINGS

from pycomm import _core, kernels, reference
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.reference import compact as reference_compact

CPU = Cpu()
F32 = np.float32
VALUES = ("1bit", "2bit", "3bit", "bfloat16", "float32")
DTYPES = ("float32", "bfloat16", "float16")
counts = st.lists(st.sampled_from([0, 1, 15, 16, 17, 64, 1000, 1024, 5003]), min_size=1, max_size=4)
groups = st.sampled_from([1, 2, 16, 64, 1024])
shares = st.sampled_from([0.0, 0.01, 0.3, 1.0])


def number_of_groups(counts: list[int], group: int) -> int:
    return sum(-(-count // group) for count in counts)


def inputs_of(counts: list[int], kind: str, seed: int, dtype: str) -> list[list[np.ndarray]]:
    """theta, param and residual: one array for each count."""
    kinds = [(kind, dtype), (kind, dtype), ("plain", "float32")]
    return [
        [made(name, count, seed + 10 * j + i, kept) for i, count in enumerate(counts)]
        for j, (name, kept) in enumerate(kinds)
    ]


class Step(NamedTuple):
    """What the kernels of a step return, and the arrays after it."""

    packets: list[Any]
    lengths: list[int]
    indices: Any
    values: Any
    residual: list[Any]
    param: list[Any]

    @property
    def packet(self) -> Any:
        (packet,) = self.packets
        return packet


def run_step(
    lists: list[list[np.ndarray]],
    k: int,
    dtype: str,
    device: Any = CPU,
    *,
    group: int = 16,
    **options: Any,
) -> Step:
    theta, param = ([device.put(x, dtype) for x in each] for each in lists[:2])
    residual = [device.put(x, torch_too=dtype == "bfloat16") for x in lists[2]]
    indices, _ = kernels.update_step(theta, param, residual, k, group=group)
    taken = kernels.encode_groups(residual, indices, group=group, **options)
    return Step(taken.packets, taken.lengths, indices, taken.values, residual, param)


def packet_of(found: Step) -> bytes:
    """The bytes of the only packet."""
    return bytes(np.asarray(found.packet))


def elements_of(counts: list[int], group: int, indices: Any) -> tuple[np.ndarray, np.ndarray]:
    """The positions of the elements of groups in arrays that begin at multiples of the group, and
    which of them are in an array."""
    at = (np.asarray(indices, np.int64)[:, None] * group + np.arange(group)).reshape(-1)
    there = [np.arange(-(-n // group) * group) < n for n in counts]
    return at.astype(np.int32), np.concatenate([np.zeros(0, bool), *there])[at]


@SETTINGS
@given(
    counts=counts,
    group=groups,
    share=shares,
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32 - 100),
    dtype=st.sampled_from(DTYPES),
    value_dtype=st.sampled_from(VALUES),
)
def test_one_update(device, counts, group, share, kind, seed, dtype, value_dtype):
    k = round(share * number_of_groups(counts, group))
    lists = inputs_of(counts, kind, seed, dtype)
    options = {"group": group, "value_dtype": value_dtype}
    wanted = reference.update_step(*lists, k, **options)
    found = run_step(lists, k, dtype, device, **options)
    assert found.lengths == [k]
    assert device.get(found.packet).tobytes() == (wanted.packet if k else b"")
    same(device.get(found.indices), wanted.indices)
    same(device.get(found.values), wanted.values)
    for got, want in zip(found.residual, wanted.residual, strict=True):
        same(device.get(got), want)
    for got, want in zip(found.param, lists[0], strict=True):
        same(device.get(got).astype(want.dtype), want)


@SETTINGS
@given(counts=counts, group=groups, share=shares, seed=st.integers(0, 2**32 - 100))
def test_packets_of_some_arrays(device, counts, group, share, seed):
    """Each as alone, and decoded together."""
    counts = [*counts, 100, 7]
    split = [0, 1, len(counts) - 2, 1, 0]
    lists = inputs_of(counts, "plain", seed, "float32")
    k = round(share * number_of_groups(counts, group))
    found = run_step(lists, k, "float32", device, group=group, split=split)
    indices, _ = reference.topk_groups(
        [e + (t - p) for t, p, e in zip(*lists, strict=True)], k, group
    )
    first = number = 0
    for packet, length, arrays in zip(found.packets, found.lengths, split, strict=True):
        own = counts[first : first + arrays]
        end = number + number_of_groups(own, group)
        mine = indices[(indices >= number) & (indices < end)] - number
        assert length == len(mine)
        if length:
            got, _ = reference_compact.unpack(device.get(packet).tobytes())
            same(got, mine.astype(np.int32))
        first, number = first + arrays, end
    sizes = [len(packet) for packet in found.packets]
    message = np.concatenate([device.get(packet) for packet in found.packets])
    of_each = [number_of_groups(counts[b:e], group) for b, e in pairwise(np.cumsum([0, *split]))]
    numbers = device.put(message), sizes, found.lengths, of_each
    batch = kernels.decode_batch(*numbers, group=group)
    same(device.get(batch.indices), elements_of(counts, group, indices)[0])
    same_sums(device, counts, batch, kernels.read_groups(*numbers, group=group))


@SETTINGS
@given(counts=counts, group=groups, share=shares, kind=st.sampled_from(KINDS), seed=st.integers(0))
def test_selection(device, counts, group, share, kind, seed):
    k = round(share * number_of_groups(counts, group))
    arrays = [made(kind, count, (seed + i) % 2**32) for i, count in enumerate(counts)]
    there = [device.put(x) for x in arrays]
    for found, wanted in zip(
        kernels.topk_groups(there, k, group), reference.topk_groups(arrays, k, group), strict=True
    ):
        same(device.get(found), wanted)


@pytest.fixture
def settings_of_kernels():
    threads, isa = _core.kernel_threads(), _core.kernel_isa()
    yield
    _core.set_kernel_threads(threads)
    _core.set_kernel_isa(isa)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "ties"])
def test_many_elements_on_threads(isa, dtype, kind, settings_of_kernels):
    """Several tasks of each pass, and a selection in several parts."""
    _core.set_kernel_isa(isa)
    _core.set_kernel_threads(3)
    counts = [700_001, 300, 500_000]
    lists = inputs_of(counts, kind, 7, dtype)
    lists[2] = [made(kind, count, 5, "float32") for count in counts]
    k = number_of_groups(counts, 2) // 8
    wanted = reference.update_step(*lists, k, group=2)
    found = run_step(lists, k, dtype, group=2)
    assert packet_of(found) == wanted.packet
    for got, want in zip(found.residual, wanted.residual, strict=True):
        same(CPU.get(got), want)
    other = run_step(inputs_of(counts, kind, 8, dtype), k // 5, dtype, group=2)
    two = np.concatenate([found.packet, other.packet])
    sizes = [len(found.packet), len(other.packet)]
    numbers = two, sizes, [k, k // 5], [number_of_groups(counts, 2)]
    both = kernels.decode_batch(*numbers, group=2)
    same_sums(CPU, counts, both, kernels.read_groups(*numbers, group=2))
    batch = kernels.decode_batch(found.packet, sizes[:1], [k], numbers[3], group=2)
    at, there = elements_of(counts, 2, wanted.indices)
    same(batch.indices, at)
    padded = [np.pad(x, (0, -len(x) % 2)) for x in wanted.residual]
    sent = batch.values + np.concatenate(padded)[at]
    np.testing.assert_allclose(sent[there], wanted.values[there], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value_dtype", VALUES)
def test_nothing_is_lost(value_dtype):
    """The residual has everything that is not in the packet, to rounding."""
    counts = [1000, 77]
    lists = inputs_of(counts, "plain", 3, "float32")
    whole = [t - p + e for t, p, e in zip(*lists, strict=True)]
    found = run_step(lists, 20, "float32", value_dtype=value_dtype)
    batch = kernels.decode_batch(found.packet, [len(found.packet)], [20], [68], group=16)
    assert len(batch.indices) == batch.lengths[0] == len(found.values) == 320
    sent = kernels.decode_sum([np.empty(count, np.float32) for count in counts], batch)
    for total, rest, one in zip(whole, found.residual, sent, strict=True):
        np.testing.assert_allclose(rest + one, total, atol=1e-5)


def test_rollback_restores_the_residual(device):
    lists = inputs_of([1000, 0, 77, 3], "plain", 4, "float32")
    whole = [e + (t - p) for t, p, e in zip(*lists, strict=True)]
    found = run_step(lists, 30, "float32", device)
    residual = found.residual
    after = [device.get(x).copy() for x in residual]
    assert not all(np.array_equal(a, b) for a, b in zip(after, whole, strict=True))
    kernels.update_rollback(residual, found.indices, found.values)
    for got, want in zip(residual, whole, strict=True):
        same(device.get(got), want)
    kernels.update_rollback(residual, found.indices, device.put(np.zeros(len(found.values), F32)))
    inside = elements_of([1000, 0, 77, 3], 16, device.get(found.indices))[1]
    assert sum(int((device.get(x) == 0).sum()) for x in residual) == inside.sum()


def test_invalid_groups_are_ignored(device):
    """A GPU cannot raise in time, and writes nothing else. 2^28 groups have 2^32 elements."""
    if device.indices_are_checked:
        return
    residual = [device.put(np.ones(100, F32)), device.put(np.ones(7, F32))]
    indices = device.put(np.array([-1, 2, 8, 2**28 + 7, 2**31 - 1], np.int32))
    kernels.update_rollback(residual, indices, device.put(np.full(80, 2, F32)))
    first, second = (device.get(x) for x in residual)
    assert set(np.flatnonzero(first != 1)) <= set(range(32, 48))
    assert (second == 1).all()


def test_more_tensors_than_a_page_has(device):
    """A launch has 600 rows."""
    counts = [5 + i % 30 for i in range(1300)]
    lists = inputs_of(counts, "plain", 5, "float32")
    k = number_of_groups(counts, 16) // 2
    wanted = reference.update_step(*lists, k)
    found = run_step(lists, k, "float32", device)
    assert device.get(found.packet).tobytes() == wanted.packet
    same(device.get(found.values), wanted.values)
    rest = np.concatenate([device.get(x) for x in found.residual])
    same(rest, np.concatenate(wanted.residual))


def same_sums(device: Any, counts: list[int], *batches: Any) -> None:
    """decode_sum and decode_update of both forms of the same packets."""
    arrays = [[device.put(np.full(n, 3, F32)) for n in counts] for _ in range(2 * len(batches))]
    for batch, out, param in zip(batches, arrays[::2], arrays[1::2], strict=True):
        kernels.decode_sum(out, batch, 1 / 3)
        kernels.decode_update(param, batch, 0.1, 1 / 3)
    for found, wanted in zip(arrays[2:], arrays[:2], strict=True):
        for one, other in zip(found, wanted, strict=True):
            same(device.get(one), device.get(other))


@SETTINGS
@given(
    counts=counts,
    group=groups,
    ranks=st.lists(st.tuples(shares, st.sampled_from(VALUES)), min_size=1, max_size=3),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32 - 200),
)
def test_packets_of_several_ranks(device, counts, group, ranks, kind, seed):
    packets, lengths, wanted = [], [], []
    for rank, (share, value_dtype) in enumerate(ranks):
        k = round(share * number_of_groups(counts, group))
        lists = inputs_of(counts, kind, seed + 50 * rank, "float32")
        found = reference.update_step(*lists, k, group=group, value_dtype=value_dtype)
        packets.append(np.frombuffer(found.packet, np.uint8))
        lengths.append(k)
        at, there = elements_of(counts, group, found.indices)
        padded = [np.pad(x, (0, -len(x) % group)) for x in found.residual]
        rest = np.concatenate([np.zeros(0, F32), *padded])[at]
        wanted.append((at, there, found.values, rest))
    numbers = [len(packet) for packet in packets], lengths, [number_of_groups(counts, group)]
    message = device.put(np.concatenate(packets))
    batch = kernels.decode_batch(message, *numbers, group=group)
    same_sums(device, counts, batch, kernels.read_groups(message, *numbers, group=group))
    ends = np.cumsum(batch.lengths)[:-1]
    parts = np.split(device.get(batch.indices), ends), np.split(device.get(batch.values), ends)
    for indices, values, (at, there, sent, rest) in zip(*parts, wanted, strict=True):
        same(indices, at)
        with np.errstate(all="ignore"):
            error = sent - values
        same(np.where(np.isfinite(error), error, F32(0))[there], rest[there])


def test_more_packets_than_a_launch_has(device):
    """A launch has 128 packets."""
    counts = [100, 33]
    found = run_step(inputs_of(counts, "plain", 1, "float32"), 3, "float32")
    packet = np.asarray(found.packet)
    message = device.put(np.tile(packet, 140))
    batch = kernels.decode_batch(message, [len(packet)] * 140, [3] * 140, [10], group=16)
    assert batch.lengths == [48] * 140
    same(device.get(batch.indices), np.tile(elements_of(counts, 16, found.indices)[0], 140))


def test_all_groups_need_no_indices():
    lists = inputs_of([4096], "plain", 1, "float32")
    found = run_step(lists, 256, "float32")
    assert len(found.packet) == 5 + 2 + 2 + 2 + 4096 // 8


def test_wrong_packets(device):
    """Each changed byte of the header, each length, other counts, and no crash for any bytes."""
    found = run_step(inputs_of([1000], "plain", 1, "float32"), 5, "float32")
    packet = np.asarray(found.packet)

    def refused(some: np.ndarray, k: int = 5, groups: int = 63, group: int = 16) -> bool:
        given = device.put(some), [len(some)], [k], [groups]
        try:
            batch = kernels.decode_batch(*given, group=group)
        except InvalidArgument:  # the allowed one, and read_groups has it, too
            with pytest.raises(InvalidArgument):
                kernels.read_groups(*given, group=group)
            return True
        same_sums(device, [1000], batch, kernels.read_groups(*given, group=group))
        indices = device.get(batch.indices)
        assert len(indices) == 0 or 0 <= indices[0] <= indices[-1] < 63 * 16
        assert (np.diff(indices) > 0).all()
        return False

    assert not refused(packet)
    assert all(refused(packet[:n]) for n in range(len(packet)))
    assert refused(packet, groups=64)
    assert refused(packet, k=4)
    assert refused(packet, group=8)
    for place in range(7):  # magic, codes, group, k, count
        for bit in range(8):
            changed = packet.copy()
            changed[place] ^= 1 << bit
            assert refused(changed) or place == 3, (place, bit)
    rng = np.random.default_rng(1)
    for _ in range(2000 if device.indices_are_checked else 100):
        changed = packet.copy()
        changed[rng.integers(0, len(packet), 3)] = rng.integers(0, 256, 3)
        refused(changed)


WRONG = {
    "shape": ({"param": np.ones(99, F32)}, "shape"),
    "dtype": ({"param": np.ones(100, np.float16)}, "as theta has"),
    "residual": ({"residual": np.ones(100, np.float16)}, "got dtype float16, expected float32"),
    "float64": ({"theta": np.ones(100)}, "got dtype float64, expected float16 or bfloat16"),
    "k": ({"k": 8}, "0..7"),
    "group": ({"group": 12}, "power of two up to 1024, for example 8 or 16$"),
    "no group": ({"group": 0}, "up to 1024, for example 1$"),
    "large group": ({"group": 2048}, "up to 1024, for example 1024$"),
    "negative group": ({"group": -1}, "got -1, expected an integer in 0"),
    "lengths": ({"theta": [np.ones(100, F32)] * 2}, "expected one length"),
    "empty": ({"theta": [], "param": [], "residual": []}, "empty"),
    "read only": ({"residual": np.broadcast_to(F32(1), 100)}, "invalid|share|read-only|contiguous"),
    "meta": ({"theta": torch.ones(100, device="meta")}, "not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_updates(name):
    changed, message = WRONG[name]
    given = {n: np.full(100, i, F32) for i, n in enumerate(("theta", "param", "residual"))}
    given = {**given, "k": 5, **changed}
    before = {n: x.copy() for n, x in given.items() if isinstance(x, np.ndarray)}
    with pytest.raises((InvalidArgument, Unsupported), match=message):
        kernels.update_step(**given)
    for n, x in before.items():
        assert np.array_equal(given[n], x), n


def test_wrong_calls():
    x, one = np.ones(100, F32), np.zeros(1, np.int32)
    refused = {
        "share memory": lambda: kernels.update_step(x, x, np.ones(100, F32), 1),
        "got 3 elements, expected 16": lambda: kernels.update_rollback(x, one, np.ones(3, F32)),
        "must ascend within 0..6": lambda: kernels.update_rollback(x, one + 7, np.ones(16, F32)),
        "invalid sizes": lambda: kernels.decode_batch(
            np.ones(9, np.uint8), [3], [1], [7], group=16
        ),
        "ascend within": lambda: kernels.encode_groups(x, one + 7),
        "got 2, expected an integer in 0..1": lambda: kernels.encode_groups(x, one, split=[2]),
        "split.*got -1": lambda: kernels.encode_groups(x, one, split=[-1, 2]),
        "one of float32, bfloat16": lambda: kernels.encode_groups(x, one, value_dtype="float16"),
        "expected int32": lambda: kernels.encode_groups(x, one.astype(np.int64)),
    }
    for message, call in refused.items():
        with pytest.raises(InvalidArgument, match=message):
            call()
    for wrong in ([99], [-1, 3], [9, 2]):
        with pytest.raises(InvalidArgument, match=r"must ascend in 0\.\.13"):
            kernels.encode_groups([x, x.copy()], np.array(wrong, np.int32), split=[1, 1])
    assert (x == 1).all()


def test_wrong_batches_of_groups():
    """A program can change what read_groups returned, and apply it to other arrays."""
    counts = [1000, 77]
    found = run_step(inputs_of(counts, "plain", 1, "float32"), 5, "float32")
    batch = kernels.read_groups(found.packet, [len(found.packet)], [5], [68])
    assert isinstance(batch, kernels.GroupBatch)
    assert batch.indices.nbytes == 4 * 5
    param = [np.ones(n, F32) for n in counts]
    last = np.array([1, 2, 3, 4, 67], np.int32)
    refused = {
        "ascend": batch._replace(indices=np.full(5, 7, np.int32)),
        "ascend within 0..67": batch._replace(indices=last + 1),
        "expected k = 4": batch._replace(indices=last[:4], lengths=[4]),
        "got 2, expected one of each of 1": batch._replace(lengths=[5, 0]),
        "got 4 indices": batch._replace(indices=last[:4]),
        "invalid sizes": batch._replace(sizes=[3]),
        "got packets of 67 groups": batch._replace(counts=[67]),
        "got packets of 68 groups, expected 35": batch._replace(group=32),
        "power of two": batch._replace(group=24),
        "got dtype int64": batch._replace(indices=batch.indices.astype(np.int64)),
    }
    for message, changed in refused.items():
        with pytest.raises(InvalidArgument, match=message):
            kernels.decode_update(param, changed, 1.0)
    with pytest.raises(InvalidArgument, match="packets of 68 groups, expected 67, those of out"):
        kernels.decode_sum([*param[:1], np.ones(64, F32)], batch)
    with pytest.raises(InvalidArgument, match="share memory"):
        kernels.decode_sum([batch.indices[:5].view(F32), np.ones(1072, F32)], batch)
    assert all((x == 1).all() for x in param)
