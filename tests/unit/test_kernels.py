"""The kernels against pycomm.reference, bit by bit, on every device of kernel_devices.py."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernel_devices import FLOATS, KINDS, TILE, made, same
from properties import SETTINGS

from pycomm import kernels, reference

kinds, seeds = st.sampled_from(KINDS), st.integers(0, 2**32 - 1)
counts = st.sampled_from([1, 2, 15, 64, 65, 999, TILE - 1, TILE, TILE + 1, 3 * TILE + 17, 70_001])


@st.composite
def count_and_k(draw):
    count = draw(counts | st.just(0))
    k = draw(st.sampled_from([0, 1, count // 1000, count // 20, count // 4, count - 1, count]))
    return count, min(max(k, 0), count)


# ---- the reference itself ------------------------------------------------------------------------


def test_reference_fma_is_exact():
    """Compared with rational numbers, near ties of the second rounding and among subnormals."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 2**32, 20_000, np.uint32).view(np.float32) for _ in range(2))
    with np.errstate(all="ignore"):
        c = np.where(rng.random(20_000) < 0.7, -a * b * rng.choice([1, 0.5, 3e-8], 20_000), b)
        c = c.astype(np.float32)
        wide = [x.astype(np.float64) for x in (a, b, c)]
        exact = reference.kernels._fma64(*wide)  # rounds the exact value to 53 bits: not twice
    found = reference.fma(a, b, c)
    from fractions import Fraction

    for i in np.flatnonzero(np.isfinite(exact) & np.isfinite(found))[:4000]:
        truth = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        below, above = (np.nextafter(found[i], np.float32(way)) for way in (-np.inf, np.inf))
        off = abs(Fraction(float(found[i])) - truth)
        for other in (below, above):
            if np.isfinite(other):
                rest = abs(Fraction(float(other)) - truth)
                even = found[i].view(np.uint32) % 2 == 0
                assert off < rest or (off == rest and even)


# ---- the step ------------------------------------------------------------------------------------


def run_step(device, tensors, k, options, workspace=None, torch_too=False):
    """(u, v, indices, values, u_values) of the kernel for one tensor, as NumPy arrays."""
    grad, u, v, weight = tensors
    real = u.dtype.name
    u, v = device.put(u, torch_too=torch_too), device.put(v, torch_too=torch_too)
    u_values = device.put(np.full(k, 7, real), torch_too=torch_too)
    indices, values = kernels.dgc_step(
        grad, u, v, k, weight=weight, u_values=u_values, workspace=workspace, **options
    )
    return [device.get(x) for x in (u, v, indices, values, u_values)]


@st.composite
def options(draw):
    return {
        "momentum": draw(st.sampled_from([0.9, 0.0, 0.5, 1e-30])),
        "weight_decay": draw(st.sampled_from([0.0, 1e-4, 3.0])),
        "nesterov": draw(st.booleans()),
        "masking": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 1 / 3, 1024.0])),
    }


@SETTINGS
@given(
    sizes=count_and_k(),
    kind=kinds,
    seed=seeds,
    dtype=st.sampled_from(FLOATS),
    weight_dtype=st.sampled_from(["float32", "grad"]),
    options=options(),
    torch_too=st.booleans(),
)
def test_one_step(device, sizes, kind, seed, dtype, weight_dtype, options, torch_too):
    count, k = sizes
    real = "float64" if dtype == "float64" else "float32"
    if weight_dtype == "grad" or dtype == "float64":
        weight_dtype = dtype
    if dtype == "float64":
        count, k = min(count, 999), min(k, 999)  # rational numbers are slow
    grad, weight = made(kind, count, seed, dtype), made("plain", count, seed + 1, weight_dtype)
    u, v = made("plain", count, seed + 2, real), made(kind, count, seed + 3, real)
    wanted = reference.dgc_step(grad, u, v, k, weight=weight, **options)
    put = [device.put(grad, dtype, torch_too=torch_too), u, v]
    put.append(device.put(weight, weight_dtype, torch_too=torch_too))
    for got, want in zip(
        run_step(device, put, k, options, torch_too=torch_too), wanted, strict=True
    ):
        same(got, want)


@SETTINGS
@given(
    bits=hnp.arrays(np.uint32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=4, max_side=40)),
    share=st.floats(0, 1),
    options=options(),
)
def test_a_step_of_any_bits(device, bits, share, options):
    """NaN of every payload, infinities, subnormals: any 32 bits."""
    grad, u, v, weight = bits[:4].view(np.float32)
    k = round(share * grad.size)
    wanted = reference.dgc_step(grad, u, v, k, weight=weight, **options)
    got = run_step(device, (device.put(grad), u, v, device.put(weight)), k, options)
    for one, want in zip(got, wanted, strict=True):
        same(one, want)


def steps_of(device, gradients, k, **options):
    """Runs the kernel with one workspace, and the reference; all bits must agree."""
    count = gradients[0].size
    u, v = np.zeros((2, count), np.float32)
    mine = device.put(u), device.put(v)
    workspace = kernels.dgc_workspace(*mine, k)
    for step, grad in enumerate(gradients):
        wanted = reference.dgc_step(grad, u, v, k, **options)
        indices, values = kernels.dgc_step(
            device.put(grad), *mine, k, workspace=workspace, **options
        )
        for got, want in zip((*mine, indices, values), wanted, strict=False):
            same(device.get(got), want)
        u, v = wanted.u, wanted.v
        yield step


def test_many_steps_with_a_workspace(device):
    """Residuals accumulate below the last threshold; gradients drift, shrink and grow."""
    rng = np.random.default_rng(5)
    count = 60_000
    spread = np.exp(2 * rng.standard_normal(count))
    sizes = np.exp(np.cumsum(rng.normal(0, 0.3, 40)))
    gradients = [(s * spread * rng.laplace(size=count)).astype(np.float32) for s in sizes]
    for k in (60, 600):
        assert sum(1 for _ in steps_of(device, gradients, k, momentum=0.9)) == 40


@pytest.mark.parametrize("fall", [1e-20, 1e-3])
def test_repair_after_a_threshold_that_was_too_high(device, fall):
    """Fewer than k candidates: the last step's threshold is above every element."""
    rng = np.random.default_rng(6)
    big = rng.laplace(size=50_000).astype(np.float32)
    gradients = [big, big, np.float32(fall) * big, np.zeros_like(big), big]
    assert list(steps_of(device, gradients, 50, momentum=0.0)) == [0, 1, 2, 3, 4]


def test_repair_after_a_threshold_that_was_too_low(device):
    """More candidates than the pool holds, in one tile, in all, and all equal."""
    small = np.random.default_rng(7).laplace(size=50_000).astype(np.float32)
    burst = small.copy()
    burst[1000 : 1000 + TILE] *= 1e6
    gradients = [small, small, burst, small * 1e9, np.full_like(small, 1e12), small]
    for masking in (True, False):
        assert len(list(steps_of(device, gradients, 50, momentum=0.5, masking=masking))) == 6


def test_workspace_contents_do_not_matter(device):
    """Its thresholds belong to other tensors here."""
    rng = np.random.default_rng(8)
    workspace = None
    for scale in (1, 1e-6, 1e6, 0, 1):
        grad = (scale * rng.laplace(size=40_000)).astype(np.float32)
        u, v = np.zeros((2, 40_000), np.float32)
        mine = device.put(u), device.put(v)
        workspace = kernels.dgc_workspace(*mine, 40) if workspace is None else workspace
        wanted = reference.dgc_step(grad, u, v, 40, momentum=0.9)
        got = kernels.dgc_step(device.put(grad), *mine, 40, momentum=0.9, workspace=workspace)
        for one, want in zip((*mine, *got), wanted, strict=False):
            same(device.get(one), want)


@pytest.mark.timeout(300)
def test_a_thousand_replays_give_the_same_bits(device):
    """Of a step and of the sum of what it sent twice; in one thread, and with several threads. It
    takes 6 s emulated: a wrong order of threads changes few of the replays."""
    for count, replays in device.replays:
        grad, u, v = (made("ties", count, seed) for seed in range(3))
        grad = device.put(grad)
        first = None
        for _ in range(replays):
            mine = device.put(u), device.put(v)
            packet = kernels.dgc_step(grad, *mine, count // 1000, momentum=0.9)
            out = kernels.decode_sum(device.put(u), [packet] * 2)
            now = b"".join(device.get(x).tobytes() for x in (*mine, *packet, out))
            first = first or now
            assert now == first


def test_more_selections_than_threads_of_a_block(device):
    """Small tensors, each of which a block selects alone, around some that blocks share."""
    counts = [40] * 260
    counts[100], counts[250], counts[258] = 3 * TILE, 5 * TILE + 1, 9 * TILE
    ks = [max(1, n // 100) for n in counts]
    us, vs = ([made("plain", n, s + n + i) for i, n in enumerate(counts)] for s in (1, 2))
    mine = [[device.put(x) for x in column] for column in (us, vs)]
    workspace = kernels.dgc_workspace(*mine, ks)
    for step in range(2):
        grads = [made("ties", n, 9 * step + n + i) for i, n in enumerate(counts)]
        indices, values = kernels.dgc_step(
            [device.put(x) for x in grads], *mine, ks, momentum=0.9, workspace=workspace
        )
        wanted = [
            reference.dgc_step(g, u, v, k, momentum=0.9)
            for g, u, v, k in zip(grads, us, vs, ks, strict=True)
        ]
        us, vs = [x.u for x in wanted], [x.v for x in wanted]
        for i, one in enumerate(wanted):
            same(device.get(indices[i]), one.indices)
            same(device.get(values[i]), one.values)


RAGGED = [1, 3, 0, TILE, 5000, 31, 70_001, 2]


@pytest.mark.parametrize("way", ["each", "together", "model"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lists(device, way, dtype):
    """Tensors of many sizes in one call: a k for each, in one packet, or one k for all."""
    ks = [min(n, max(1, n // 100)) for n in RAGGED]
    us, vs = ([made("plain", n, s + n) for n in RAGGED] for s in (1, 2))
    mine = [[device.put(x) for x in column] for column in (us, vs)]
    factors = np.linspace(0.5, 2, len(RAGGED)).astype(np.float32)
    k = sum(ks) if way == "model" else ks
    workspace = kernels.dgc_workspace(*mine, k)
    for step in range(4):
        grads, weights = (
            [made("ties", n, 9 * step + n + i, dtype) for n in RAGGED] for i in (3, 4)
        )
        indices, values = kernels.dgc_step(
            [device.put(x, dtype) for x in grads],
            *mine,
            k,
            momentum=0.9,
            weight=[device.put(x, dtype) for x in weights],
            weight_decay=0.1,
            scale=device.put(factors),
            together=way == "together",
            workspace=workspace,
        )
        options = {"momentum": 0.9, "weight_decay": 0.1}
        if way == "model":
            flat = (np.concatenate(x) for x in (grads, us, vs))
            wanted = [
                reference.dgc_step(
                    *flat,
                    k,
                    weight=np.concatenate(weights),
                    scale=np.repeat(factors, RAGGED),
                    **options,
                )
            ]
            ends = np.cumsum(RAGGED)[:-1]
            us, vs = np.split(wanted[0].u, ends), np.split(wanted[0].v, ends)
            indices, values = [indices], [values]
        else:
            wanted = [
                reference.dgc_step(g, u, v, k, weight=w, scale=s, **options)
                for g, u, v, k, w, s in zip(grads, us, vs, ks, weights, factors, strict=True)
            ]
            us, vs = [x.u for x in wanted], [x.v for x in wanted]
        if way == "together":
            firsts = itertools.accumulate(RAGGED[:-1], initial=0)
            places = [x.indices + f for x, f in zip(wanted, firsts, strict=True)]
            wanted = [
                wanted[0]._replace(
                    indices=np.concatenate(places).astype(np.int32),
                    values=np.concatenate([x.values for x in wanted]),
                )
            ]
            indices, values = [indices], [values]
        for got, want in zip(
            indices + values, [x.indices for x in wanted] + [x.values for x in wanted], strict=True
        ):
            same(device.get(got), want)
        for got, want in zip(mine[0] + mine[1], us + vs, strict=True):
            same(device.get(got), want)


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
@pytest.mark.parametrize("masking", [True, False])
def test_found_inf_and_rollback(device, found_inf, masking):
    """A step with found_inf changes nothing; a step rolled back keeps its gradient."""
    grad, u, v = (made("odd ones", 9000, seed) for seed in range(3))
    flag = np.array([found_inf], np.float32)
    wanted = reference.dgc_step(grad, u, v, 90, momentum=0.9, masking=masking, found_inf=found_inf)
    mine = device.put(u), device.put(v)
    u_values = device.put(np.full(90, 5, np.float32))
    packet = kernels.dgc_step(
        device.put(grad), *mine, 90, momentum=0.9, masking=masking,
        found_inf=device.put(flag), u_values=u_values,
    )  # fmt: skip
    for got, want in zip((*mine, *packet, u_values), wanted, strict=True):
        same(device.get(got), want)
    kernels.dgc_rollback(*mine, *packet, u_values, found_inf=device.put(flag))
    kept = reference.dgc_step(grad, u, v, 0, momentum=0.9, found_inf=found_inf)
    same(device.get(mine[0]), kept.u)
    same(device.get(mine[1]), kept.v)


def test_rollback_of_lists(device):
    sizes, ks = [5000, 3, 9000], [5, 1, 30]
    for together in (False, True):
        us, vs = ([made("plain", n, s) for n in sizes] for s in (1, 2))
        mine = [[device.put(x) for x in column] for column in (us, vs)]
        lengths = [sum(ks)] if together else ks
        u_values = [device.put(np.zeros(k, np.float32)) for k in lengths]
        zeros = [device.put(np.zeros(n, np.float32)) for n in sizes]
        packets = kernels.dgc_step(
            zeros, *mine, ks, momentum=1.0, together=together,
            u_values=u_values[0] if together else u_values,
        )  # fmt: skip
        kernels.dgc_rollback(*mine, *packets, u_values[0] if together else u_values)
        for i, (u, v) in enumerate(zip(us, vs, strict=True)):
            same(device.get(mine[0][i]), u)
            same(device.get(mine[1][i]), v + u)


# ---- selection -----------------------------------------------------------------------------------


@SETTINGS
@given(sizes=count_and_k(), kind=kinds, seed=seeds, dtype=st.sampled_from(FLOATS))
@example(sizes=(3 * TILE + 17, 12), kind="odd ones", seed=1, dtype="float32")
def test_topk(device, sizes, kind, seed, dtype):
    count, k = sizes
    x = made(kind, count, seed, dtype)
    indices, values = kernels.topk(device.put(x, dtype), k)
    want = reference.topk(x, k)
    same(device.get(indices), want[0])
    same(device.get(values), want[1])
    if k > 0:
        same(device.get(kernels.threshold(device.put(x, dtype), k)), reference.threshold(x, k))


@SETTINGS
@given(bits=hnp.arrays(np.uint32, st.integers(1, 200)), share=st.floats(0, 1))
def test_topk_of_any_bits(device, bits, share):
    """NaN by their bits, like all other values."""
    x = bits.view(np.float32)
    k = round(share * x.size)
    for got, want in zip(kernels.topk(device.put(x), k), reference.topk(x, k), strict=True):
        same(device.get(got), want)


def test_topk_into_buffers_of_the_caller(device):
    x = device.put(made("plain", 30_000, 1))
    room = kernels.topk_workspace(x, 30)
    buffers = device.put(np.zeros(30, np.int32)), device.put(np.zeros(30, np.float32))
    found = kernels.topk(x, 30, indices=buffers[0], values=buffers[1], workspace=room)
    assert found[0] is buffers[0]
    assert found[1] is buffers[1]
    same(device.get(buffers[1]), reference.topk(device.get(x), 30)[1])


@pytest.mark.parametrize("share", [10, 2])
@pytest.mark.parametrize("kind", ["plain", "ties"])
def test_many_of_a_large_array(kind, share):
    """More than a 64th of it, on the CPU: parts of the array are counted separately."""
    x = made(kind, 1_200_000, 11)
    for found, wanted in zip(
        kernels.topk(x, x.size // share), reference.topk(x, x.size // share), strict=True
    ):
        same(found, wanted)
