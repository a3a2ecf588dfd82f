"""DGC with compact packets: required properties for every kind of values, and the bytes sent.

Ranks are threads. Torch's DDP: test_dgc_steps.py. Loss scales: test_compression_contract.py. Choice
of the exchange: test_dgc_exchange_policy.py. The packets: test_compact.py.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from dgc_training import compressed, memory_of, residual_by_owner, sgd
from kernel_devices import DEVICES
from small_models import batch, equal, parameters, perceptron, step_on
from torch import Tensor, nn

import pycomm
from benchmarks.training.received_bytes_ranks import moved
from pycomm.compress.dgc import compressor_of
from pycomm.compress.schedule import (
    VALUE_DTYPES,
    Load,
    index_bits,
    packet_bytes,
    received_bytes,
)
from pycomm.compress.sharded import BLOCK, Sharding
from pycomm.errors import Unsupported
from pycomm.testing import run_ranks

FORMS = [
    *(("gather", value_dtype) for value_dtype in VALUE_DTYPES),
    *(("sharded", value_dtype) for value_dtype in ("float32", "2bit")),
]


def trained_perceptron(
    group: pycomm.Group,
    options: dict[str, Any],
    form: dict[str, Any] | None = None,
    stop: int | None = None,
) -> list[Tensor]:
    """The parameters after 6 steps and this rank's u and v; from `stop` on with a new model, which
    loads the states."""
    settings = {"nesterov": True, "exchange": "gather", **options}
    module = perceptron()
    model, optimizer, dgc = compressed(module, form, **settings)
    for step in range(6):
        if step == stop:
            saved = [x.state_dict() for x in (module, optimizer, dgc)]
            module = perceptron(2)
            model, optimizer, dgc = compressed(module, form, **settings)
            for one, state in zip((module, optimizer, dgc), saved, strict=True):
                one.load_state_dict(state)
        step_on(model, batch(group.rank, step), optimizer)
    return [*parameters(module), *(x for pair in memory_of(dgc).values() for x in pair)]


def same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(equal(*pair) for pair in zip(a, b, strict=True))


@pytest.mark.parametrize("select", ["parameter", "model"])
def test_without_rounding_the_codec_changes_no_bit(select: str) -> None:
    raw, compact = (
        run_ranks(3, trained_perceptron, {"codec": codec, "select": select})
        for codec in ("raw", "compact")
    )
    assert same(raw, compact)


@pytest.mark.parametrize(("exchange", "value_dtype"), FORMS)
def test_buckets_fusion_and_a_resume_change_no_bit(exchange: str, value_dtype: str) -> None:
    """P5, P7, P8."""
    options = {"exchange": exchange, "value_dtype": value_dtype, "codec": "compact"}
    results = run_ranks(3, trained_perceptron, options)
    count = len(parameters(perceptron()))
    assert all(equal(one[:count], results[0][:count]) for one in results)
    assert not equal(results[0][count:], results[1][count:])
    assert same(results, run_ranks(3, trained_perceptron, options, {"bucket_mb": 1e-5, "lanes": 2}))
    assert same(results, run_ranks(3, trained_perceptron, options, None, 3))
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):  # torch's SGD then uses fma
        assert same(results, run_ranks(3, trained_perceptron, {**options, "fused": True}))


@pytest.mark.parametrize(("exchange", "value_dtype"), [("gather", "3bit"), ("sharded", "2bit")])
def test_cuda_kernels_change_no_bit(exchange: str, value_dtype: str) -> None:
    """Emulated, as their arrays are in host memory: all of a step except the copies."""
    options = {"exchange": exchange, "value_dtype": value_dtype, "codec": "compact"}
    wanted = run_ranks(2, trained_perceptron, options)
    with DEVICES["emulated"]() as device:
        device.module.take_traffic()  # of other tests
        found = run_ranks(2, trained_perceptron, options)
        assert device.module.take_traffic()[2] > 0
    assert same(found, wanted)


def trained_alone(
    group: pycomm.Group, options: dict[str, Any], steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Momentum 0, rate 1, so that sent values and residuals sum to all gradients: weights, and the
    sums over ranks of gradients and of residuals."""
    layer = nn.Linear(3000, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = sgd(layer, momentum=0.0, lr=1.0)
    dgc = pycomm.DGC(optimizer, sparsity=[0.9], min_count=1, **options)
    model = pycomm.DataParallel(layer, compression=dgc)
    own = torch.Generator().manual_seed(group.rank)
    total = torch.zeros(3000, dtype=torch.float64)
    for _ in range(steps):
        gradient = torch.randn(1, 3000, generator=own).exp() - 1.5
        total += gradient[0]
        optimizer.zero_grad()
        model(gradient).sum().backward()
        optimizer.step()
    (memory,) = compressor_of(dgc).state.memories.values()
    assert memory.v is not None
    here = memory.v.double() + residual_by_owner(dgc, group)
    return layer.weight.detach()[0], pycomm.all_reduce(total), pycomm.all_reduce(here)


WANTED = {"float32": 5.47, "bfloat16": 3.47, "3bit": 1.85, "2bit": 1.72, "1bit": 1.60}


@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
def test_bytes_of_an_element(value_dtype: str) -> None:
    """A thousandth of 4 M; headers and lengths are counted."""
    count = 1 << 22
    options = {"value_dtype": value_dtype, "exchange": "gather", "codec": "compact"}
    for one in run_ranks(2, moved, count, options):
        assert one.k == round(count / 1000)
        assert one.sent <= one.written <= one.sent + 200  # frames
        assert one.written <= WANTED[value_dtype] * one.k
        guess = packet_bytes([one.k], [count], 4, value_dtype)
        assert abs(one.sent - guess) <= 0.01 * guess


def test_sharded_receives_the_same_for_any_number_of_ranks() -> None:
    """A thousandth of 2 M with 2-bit values: at most 0.0042 bytes of each element."""
    count = 1 << 21
    options = {"value_dtype": "2bit", "exchange": "sharded"}
    for ranks in (2, 3, 8):
        found = run_ranks(ranks, moved, count, options)
        assert max(one.received for one in found) <= 0.0042 * count
        for one in found if ranks == 2 else ():  # otherwise a ring forwards packets
            assert one.sent <= one.written <= one.sent + 300


@pytest.mark.parametrize("owner_k_factor", [2, 4])
def test_owners_send_owner_k_factor_times_k(owner_k_factor: int) -> None:
    """In the bytes that "auto" uses; the rest stays in the residual, which becomes smaller."""
    count, size = 1 << 21, 3
    options = {"value_dtype": "2bit", "exchange": "sharded", "owner_k_factor": owner_k_factor}
    for one in run_ranks(size, moved, count, options):
        load = Load([one.k], [count], 4, "2bit", owner_k_factor)
        expected = received_bytes(load, size)["sharded"]
        assert abs(one.received - expected) < 0.05 * expected + 350  # frames
        once = received_bytes(Load([one.k], [count], 4, "2bit"), size)["sharded"]
        assert (
            one.received > (1 + owner_k_factor) / 2 * 0.8 * once
        )  # indices are denser in the all-gather phase
    residual = []
    for factor in (1, owner_k_factor):
        form = {"exchange": "sharded", "value_dtype": "2bit", "owner_k_factor": factor}
        ((weight, total, missing), *others) = run_ranks(4, trained_alone, form, 12)
        assert all(torch.equal(weight, other) for other, _, _ in others)
        assert float((missing - 4 * weight - total).abs().max()) <= 1e-5 * float(total.abs().max())
        residual.append(float(missing.abs().sum()))
    assert residual[1] < 0.95 * residual[0]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("counts", [[1], [31], [5000], [4096, 0, 100, 1]])
def test_shards_partition_the_coordinates(counts: list[int], size: int) -> None:
    share = Sharding(counts, size)
    coordinates = torch.arange(sum(counts), dtype=torch.int32)
    cut, order = share.cut(coordinates, coordinates.double())
    assert torch.equal(cut.values, coordinates[order].double())
    assert len(cut.lengths) == size * len(counts)
    firsts = itertools.accumulate(share.places * size, initial=0)
    parts = (torch.split(part, cut.lengths) for part in (cut.indices, cut.values))
    rows = zip(*parts, firsts, share.places * size, strict=False)
    for packet, (places, values, begin, count) in enumerate(rows):
        owner, array = divmod(packet, len(counts))
        first = begin - owner * sum(share.places)
        assert bool((places.diff() > 0).all())
        assert torch.equal(share.whole(owner, places).double(), values)
        local = places - first
        assert local.numel() == 0 or 0 <= int(local[0]) <= int(local[-1]) < count
        alone = Sharding([counts[array]], size)
        assert torch.equal(alone.whole(owner, local).double() + sum(counts[:array]), values)
    assert torch.equal(share.joined(cut).double(), cut.values)
    assert sum(cut.lengths) == sum(counts)
    for array in range(len(counts)):
        each = cut.lengths[array :: len(counts)]
        assert max(each) - min(each) <= BLOCK


def test_strided_indices_spread_over_owners() -> None:
    """Hot rows, hot columns of widths that could align with the shards, and hot beginnings."""
    count, size = 1 << 20, 64
    share = Sharding([count], size)
    every = torch.arange(count, dtype=torch.int32)
    for width in (64, 512, 2048, 8192):
        column, row = every % width, every // width
        hot_rows = (row % 7 == 0) & (column < width // 2)
        for hot in (column < 8, hot_rows, every < count // 16):
            found = share.cut(every[hot], every[hot].double())[0].lengths
            assert max(found) <= 1.5 * sum(found) / size, width


def test_estimated_bits_of_an_index() -> None:
    """Above the entropy of an index set, by at most the overhead of a Rice code."""
    for density in (0.25, 1 / 64, 1e-3, 1e-4):
        chosen, rest = density, 1 - density
        entropy = (-chosen * math.log2(chosen) - rest * math.log2(rest)) / density
        assert entropy < index_bits(density) < 1.03 * entropy
    assert index_bits(1.0) == 1.0


def test_parameters_on_another_device_are_rejected() -> None:
    optimizer = sgd(nn.Linear(200, 200, device="meta"))
    with pytest.raises(Unsupported, match=r"is on meta.*codec"):
        pycomm.DGC(optimizer, value_dtype="2bit")
