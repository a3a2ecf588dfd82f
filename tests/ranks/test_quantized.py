"""pycomm.all_reduce with compression=Quantize(): against a model on pycomm.reference; error
feedback, states, failures and bytes. Ranks are threads.
"""

from typing import Any

import numpy as np
import pytest
import torch
from kernel_devices import same
from on_ranks import on_ranks

import pycomm
from pycomm import reference
from pycomm.errors import Error, InvalidArgument, Mismatch, Unsupported
from pycomm.testing import FaultPlan, run_ranks

BLOCK = 4096
COUNT = 5 * BLOCK + 77


def values(rank: int, step: int, count: int = COUNT) -> np.ndarray:
    return np.random.default_rng([rank, step]).laplace(size=count).astype(np.float32)


def model(
    ranks: int, steps: int, quantize: pycomm.Quantize, count: int = COUNT, factor: float = 1.0
) -> list[np.ndarray]:
    """The results of each step, in NumPy: block b is owned by rank b % ranks."""
    residuals = np.zeros((ranks, count), np.float32)
    owned = np.zeros(count, np.float32)  # of the owner of each block
    found = []
    for step in range(steps):
        result = np.empty(count, np.float32)
        for begin in range(0, count, BLOCK):
            part = np.s_[begin : min(begin + BLOCK, count)]
            n = part.stop - part.start
            total = np.zeros(n, np.float32)
            for rank in range(ranks):
                x = values(rank, step, count)[part]
                packet, lost = reference.quantize(x, quantize.bits, residuals[rank][part])
                total = total + reference.dequantize(packet, n, quantize.bits)
                residuals[rank][part] = lost if quantize.error_feedback else 0
            packet, lost = reference.quantize(total, quantize.down_bits, owned[part])
            owned[part] = lost if quantize.error_feedback else 0
            result[part] = np.float32(factor) * reference.dequantize(packet, n, quantize.down_bits)
        found.append(result)
    return found


@on_ranks("ranks")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "quantize",
    [
        pycomm.Quantize(),
        pycomm.Quantize(bits=1, down_bits=4),
        pycomm.Quantize(bits=4, down_bits=2),
        pycomm.Quantize(bits=8, down_bits=3, error_feedback=False),
        pycomm.Quantize(bits=8, down_bits=8),  # the only sums whose bits depend on the order
    ],
)
def test_all_ranks_get_the_bits_of_the_model(
    group: pycomm.Group, ranks: int, quantize: pycomm.Quantize
) -> None:
    state = quantize.state()
    results = [
        pycomm.all_reduce(values(group.rank, step), "mean", compression=quantize, state=state)
        for step in range(3)
    ]
    for got, want in zip(results, model(ranks, 3, quantize, factor=1 / ranks), strict=True):
        same(got, want)


@pytest.mark.parametrize("count", [0, 1, BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sizes_and_dtypes(count: int, dtype: torch.dtype) -> None:
    """With 4 ranks some own nothing."""

    def program(group: pycomm.Group) -> torch.Tensor:
        x = torch.from_numpy(values(group.rank, 0, count)).to(dtype)
        return pycomm.all_reduce(x, compression=pycomm.Quantize(8, 8))

    results = run_ranks(4, program)
    assert all(torch.equal(result, results[0]) for result in results)
    exact = sum(torch.from_numpy(values(rank, 0, count)).to(dtype).float() for rank in range(4))
    torch.testing.assert_close(results[0].float(), exact, atol=0.2, rtol=0.05)


def test_feedback_conserves_the_sum() -> None:
    """All results plus all residuals are the sum of all arrays."""

    def program(group: pycomm.Group) -> Any:
        quantize = pycomm.Quantize(2, 2)
        state = quantize.state()
        assert state.residual() is None
        given, results = np.zeros(COUNT), np.zeros(COUNT)
        for step in range(12):
            x = values(group.rank, step)
            given += x
            results += pycomm.all_reduce(x, compression=quantize, state=state)
        return given, results, state.residual()

    ranks = run_ranks(3, program)
    given, residual = sum(rank[0] for rank in ranks), sum(rank[2] for rank in ranks)
    assert np.abs(residual).max() > 0.1
    np.testing.assert_allclose(ranks[0][1] + residual, given, atol=1e-3)


@on_ranks(2)
def test_a_state_resumes_bit_for_bit(group: pycomm.Group) -> None:
    quantize = pycomm.Quantize(1, 2)
    state, results = quantize.state(), []
    for step in range(4):
        if step in (0, 2):
            saved, state = state.state_dict(), quantize.state()
            state.load_state_dict(saved)
        x = values(group.rank, step)
        results.append(pycomm.all_reduce(x, compression=quantize, state=state))
    for got, want in zip(results, model(2, 4, quantize), strict=True):
        same(got, want)


@on_ranks(2)
def test_a_sum_that_is_not_finite_changes_no_state(group: pycomm.Group) -> None:
    quantize = pycomm.Quantize()
    state = quantize.state()
    pycomm.all_reduce(values(group.rank, 0), compression=quantize, state=state)
    before = state.state_dict()
    x = values(group.rank, 1)
    x[5000] = np.nan if group.rank == 1 else x[5000]
    pycomm.all_reduce(x, compression=quantize, state=state)
    assert np.isnan(x[BLOCK : 2 * BLOCK]).all()
    assert np.isfinite(x[:BLOCK]).all()
    after = state.state_dict()
    for name in ("residual", "owner_residual"):
        same(after[name], before[name])


@pytest.mark.parametrize(("verb", "after"), [("all_to_all", 9_000), ("all_gather", 30_000)])
def test_a_failed_call_changes_nothing(verb: str, after: int) -> None:
    """The connection closes within a call of either phase: array and state stay as they were."""

    def program(group: pycomm.Group) -> bool:
        quantize = pycomm.Quantize()
        state = quantize.state()
        for step in range(6):
            x, before = values(group.rank, step), state.state_dict()
            try:
                pycomm.all_reduce(x, compression=quantize, state=state)
            except Error:  # the exchange that the test made fail
                assert step > 0
                same(x, values(group.rank, step))
                for name in ("residual", "owner_residual"):
                    same(state.state_dict()[name], before[name])
                return True
        return False

    fault = FaultPlan(rank=1, action="disconnect", at=verb, after_bytes=after)
    assert all(run_ranks(2, program, faults=[fault], timeout_s=20))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("bits", "down_bits"), [(3, 8), (3, 3), (8, 8), (1, 4)])
def test_bytes_on_the_transport(ranks: int, bits: int, down_bits: int) -> None:
    """3 bits are 10.7 times fewer than float32, 8 bits 4 times; frames and levels included."""
    count = 64 * BLOCK

    def program(group: pycomm.Group) -> int:
        quantize = pycomm.Quantize(bits, down_bits)
        before = group.stats().bytes_written
        pycomm.all_reduce(values(group.rank, 0, count), compression=quantize)
        return group.stats().bytes_written - before

    written = sum(run_ranks(ranks, program))
    wanted = (ranks - 1) * count * (bits + down_bits) / 8
    assert wanted <= written <= 1.03 * wanted


@on_ranks(2)
def test_ranks_that_differ_in_bits_raise(group: pycomm.Group) -> None:
    x = values(group.rank, 0)
    with pytest.raises(Mismatch):
        pycomm.all_reduce(x, compression=pycomm.Quantize(3 + group.rank))
    same(x, values(group.rank, 0))


@on_ranks(1)
def test_one_rank_alone_is_exact(group: pycomm.Group) -> None:
    x = pycomm.all_reduce(values(0, 0), compression=pycomm.Quantize(1, 1))
    same(x, values(0, 0))


@on_ranks(2)
def test_wrong_arguments(group: pycomm.Group) -> None:
    for wrong in ({"bits": 5}, {"down_bits": 0}, {"bits": True}, {"error_feedback": 1},
                  {"exchange": "gather"}):  # fmt: skip
        with pytest.raises(InvalidArgument):
            pycomm.Quantize(**wrong)
    assert repr(pycomm.Quantize(2)) == (
        "Quantize(bits=2, down_bits=8, error_feedback=True, exchange='auto')"
    )
    quantize, x = pycomm.Quantize(), values(0, 0)
    state = quantize.state()
    pycomm.all_reduce(x, compression=quantize, state=state)
    for error, arguments in (
        (InvalidArgument, {"compression": "3bit"}),
        (InvalidArgument, {"state": state}),
        (InvalidArgument, {"compression": quantize, "state": {}}),
        (InvalidArgument, {"compression": quantize, "timeout_s": 0}),
        (Unsupported, {"compression": quantize, "op": "max"}),
        (Unsupported, {"compression": quantize, "algorithm": "ring"}),
        (Unsupported, {"compression": quantize, "async_op": True}),
    ):
        with pytest.raises(error):
            pycomm.all_reduce(x, **arguments)
    for array in (x.astype(np.float64), np.arange(9), values(0, 0)[::2], x[:BLOCK]):
        with pytest.raises(InvalidArgument):
            pycomm.all_reduce(array, compression=quantize, state=state)
    with pytest.raises(InvalidArgument):
        state.load_state_dict({**state.state_dict(), "version": 7})
    with pytest.raises(InvalidArgument):
        state.load_state_dict({**state.state_dict(), "residual": x[:9]})
