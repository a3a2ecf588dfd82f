"""The default exchange of a level of DGC: "auto" by bytes, "auto_time" by seconds.

Ranks are threads. The exchanges themselves: test_dgc_compact.py.
"""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from dgc_training import compressed
from small_models import batch, perceptron, step_on
from torch import nn

import pycomm
from pycomm._training.communicators import CommunicatorPool
from pycomm.compress import cost_model
from pycomm.compress.cost_model import Coding, Link, predicted
from pycomm.compress.dgc import compressor_of
from pycomm.compress.schedule import Load, code_at, received_bytes
from pycomm.testing import run_ranks


def took(group: pycomm.Group, options: dict[str, Any], steps: int = 1) -> list[dict[str, Any]]:
    """The exchange that stats() reports for each step."""
    module = nn.Linear(200, 500)
    model, optimizer, dgc = compressed(module, exchange="auto", min_count=1000, **options)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 200)).square().mean().backward()
        optimizer.step()
        found.append(dgc.stats())
    return found


def test_auto_counts_coded_bytes() -> None:
    """With raw packets sharding pays at a quarter sparsity from four ranks on; with coded ones from
    three ranks on."""
    found = {
        (ranks, value_dtype): {
            stats[0]["exchange"]
            for stats in run_ranks(ranks, took, {"sparsity": [0.75], "value_dtype": value_dtype})
        }
        for ranks, value_dtype in itertools.product((2, 4), ("float32", "2bit"))
    }
    assert found == {
        (2, "float32"): {"gather"},
        (4, "float32"): {"gather"},  # the same number
        (2, "2bit"): {"gather"},
        (4, "2bit"): {"sharded"},
    }


def test_levels_above_a_sixth_send_signs() -> None:
    """Other levels do not, nor values that must not be rounded."""
    ramp = {"sparsity": [0.5, 0.75, 0.9], "rampup_step": 3}
    for value_dtype, wanted in (
        ("bfloat16", ["1bit", "1bit", "bfloat16"]),
        ("float32", ["float32", "float32", "float32"]),
    ):
        options = {**ramp, "value_dtype": value_dtype, "codec": "compact"}
        for stats in run_ranks(3, took, options, 3):
            assert [one["value_dtype"] for one in stats] == wanted
            assert [one["exchange"] for one in stats] == ["sharded"] * 3


@pytest.mark.parametrize("size", [2, 3, 8, 64, 1024])
@pytest.mark.parametrize("value_dtype", ["bfloat16", "3bit", "2bit", "1bit"])
def test_each_warm_up_level_sends_at_most_an_eighth_of_a_bf16_ring(
    size: int, value_dtype: str
) -> None:
    """By counted bytes, of 300 M elements."""
    count = 3 * 10**8
    ring = 2 * (size - 1) / size * 2 * count
    for sparsity in (0.75, 0.9375, 0.984375, 0.996, 0.999):
        code = code_at(value_dtype, 1 - sparsity)
        load = Load([round(count * (1 - sparsity))], [count], 4, code)
        assert min(received_bytes(load, size).values()) <= ring / 8


FAST, SLOW = Link(1e-5, 1e-11), Link(1e-3, 1e-7)
CODING = Coding(select=1e-9, scan=1e-10, encode=4e-9, decode=4e-9, add=2e-9)


def test_auto_time_compares_seconds() -> None:
    """A fast link sends everything dense, a slow one the smallest packets, whatever the coding
    time."""
    load = Load([10**4], [10**7], 4, "2bit")

    def best(link: Link, size: int) -> str:
        found = predicted(load, size, link, CODING)
        return min(found, key=lambda name: found[name])

    assert best(FAST, 8) == "dense"
    assert best(SLOW, 8) == best(SLOW, 64) == "sharded"
    assert best(Link(1e-3, 1e-9), 2) == "gather"


@pytest.mark.parametrize("owner_k_factor", [1, 2, 4])
def test_auto_time_counts_what_owners_forward(owner_k_factor: int) -> None:
    """Coding and transmission are counted."""
    k, n, size, link = 10**4, 10**7, 8, Link(1e-3, 1e-9)
    load = Load([k], [n], 4, "2bit", owner_k_factor)
    wanted = (CODING.select + CODING.scan * (1 + 2 / size)) * n + 4 * link.call_s
    wanted += (1 + owner_k_factor) * k * (CODING.encode + CODING.decode + CODING.add)
    wanted += received_bytes(load, size)["sharded"] * link.byte_s
    found = predicted(load, size, link, CODING)
    assert found.pop("sharded") == pytest.approx(wanted, rel=1e-12)
    others = predicted(replace(load, owner_k_factor=1), size, link, CODING)
    del others["sharded"]
    assert found == others


def test_auto_counts_bytes_that_owners_forward() -> None:
    def program(group: pycomm.Group, owner_k_factor: int) -> dict[str, float]:
        options = {"exchange": "auto", "value_dtype": "2bit", "owner_k_factor": owner_k_factor}
        model, optimizer, dgc = compressed(perceptron(), **options)
        step_on(model, batch(group.rank, 0), optimizer)
        return dgc.stats()["exchange_costs"]

    one, four = (run_ranks(2, program, owner_k_factor)[0] for owner_k_factor in (1, 4))
    assert four.pop("sharded") > 1.2 * one.pop("sharded")
    assert four == one


def test_auto_time_is_decided_once_by_rank_0() -> None:
    """Ranks with different clocks choose equally; dense is no option while v is not empty."""

    def program(group: pycomm.Group) -> tuple[list[Any], dict[int, str], bool]:
        module = perceptron()
        options = {
            "sparsity": [0.5, 0.9],
            "rampup_step": 4,
            "exchange": "auto_time",
            "codec": "compact",
        }
        model, optimizer, dgc = compressed(module, **options)
        stats = []
        for step in range(6):
            step_on(model, batch(group.rank, step), optimizer)
            stats.append(dgc.stats())
        again = compressed(perceptron(), **options)[2]
        again.load_state_dict(dgc.state_dict())
        exchanges = compressor_of(dgc).exchanges
        return stats, exchanges, compressor_of(again).exchanges == exchanges

    def by_rank(load: Load, pool: CommunicatorPool, may_be_dense: bool, device: Any) -> Any:
        low = ("sharded", "gather", "dense_masked")[pool.group.rank]  # as each rank would choose
        names = ["dense"] * may_be_dense + ["gather", "dense_masked", "sharded"]
        return {name: 1.0 + (name != low) for name in names}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_model, "measure_exchanges", by_rank)
        results = run_ranks(3, program)
    for steps, exchanges, kept in results:
        assert [one["exchange"] for one in steps] == ["sharded"] * 6
        assert "dense" in steps[1]["exchange_costs"]
        assert "dense" not in steps[2]["exchange_costs"]
        assert exchanges == {0: "sharded", 1: "sharded"}
        assert kept


def test_auto_time_measures() -> None:
    """Whatever the times are, all ranks take the same exchange, and stats() shows the numbers."""
    options = {"exchange": "auto_time", "value_dtype": "2bit"}

    def program(group: pycomm.Group) -> tuple[str, dict[str, float]]:
        model, optimizer, dgc = compressed(perceptron(), **options)
        for step in range(3):
            step_on(model, batch(group.rank, step), optimizer)
        stats = dgc.stats()
        return stats["exchange"], stats["exchange_costs"]

    results = run_ranks(2, program)
    assert results[0] == results[1]
    exchange, exchange_costs = results[0]
    assert set(exchange_costs) == {"dense", "gather", "dense_masked", "sharded"}
    assert all(math.isfinite(value) and value >= 0 for value in exchange_costs.values())
    assert exchange == min(exchange_costs, key=lambda name: exchange_costs[name])
