"""Small random trainings: every compression and exchange, with unusual parameters, two optimizers,
loss scales, clipping, accumulation, join and checkpoints, in combinations that no other test has.

support/combinations.py draws them, support/combination_checks.py has the invariants. The seeds are
those of the day (support/sample.py). A failure prints its seed; alone it runs with

    SEED=123 python -m pytest tests/ranks/test_combinations.py -k threads

`make combinations` runs as many as MINUTES=60 allow.
"""

import os
import time
from collections.abc import Callable, Iterator

import pytest
from combination_checks import check
from combination_runs import Record, train, train_under_ddp
from combinations import KINDS, Plan, plan_of
from sample import day
from torch_ranks import Run, run_fixture  # noqa: F401 - a fixture

from pycomm.testing import run_ranks

MINUTES = float(os.environ.get("COMBINATIONS_MINUTES", "0"))
SEEDS_OF_A_DAY = 1_000_000  # the first half is for make test-full, the other one for the night
# Of plans with threads, and with processes for torch's DDP: those that every run has, and seconds
# in which it starts more.
LEAST = {"threads": 24, "ddp": 4}
SECONDS = {"threads": 30.0, "ddp": 8.0}

pytestmark = [
    pytest.mark.timeout(400 + 60 * MINUTES),  # a night takes longer than the limit of a test
    pytest.mark.filterwarnings("ignore:SGD with momentum:UserWarning"),
]


def seeds(ways: str) -> Iterator[int]:
    """The seeds of this run, until its time is over."""
    if "SEED" in os.environ:
        yield int(os.environ["SEED"])
        return
    first = day() * SEEDS_OF_A_DAY + (SEEDS_OF_A_DAY // 2 if MINUTES else 0)
    end = time.monotonic() + (60 * MINUTES or SECONDS[ways])
    count = 0
    while count < LEAST[ways] or time.monotonic() < end:
        yield first + count
        count += 1
    print(f"{count} plans from seed {first}")


def run_all(ways: str, records_of: Callable[[Plan], list[list[Record]]]) -> None:
    for seed in seeds(ways):
        plan = plan_of(seed, ddp=ways == "ddp")
        try:
            check(plan, records_of(plan))
        except (Exception, pytest.fail.Exception) as error:  # the latter of processes
            command = f"SEED={seed} python -m pytest {__file__} -k {ways}"
            raise AssertionError(f"{error}\n{plan}\n\nTo run it alone: {command}") from error


def with_threads(plan: Plan) -> list[list[Record]]:
    hosts = {"transport": "tcp", "host_names": plan.hosts} if plan.hosts else {}
    options = {"reproducible": plan.reproducible, **hosts}
    return run_ranks(plan.ranks, lambda group: train(group.rank, plan), **options)


def test_threads() -> None:
    run_all("threads", with_threads)


def test_ddp(run: Run) -> None:
    run_all("ddp", lambda plan: run(plan.ranks, train_under_ddp, plan))


def test_seeds_draw_every_case() -> None:
    plans = [plan_of(seed) for seed in range(1000)]
    assert repr(plan_of(7)) == repr(plans[7])
    assert {plan.kind for plan in plans} == set(KINDS)
    found = {
        (p.kind, {**p.options, **p.options.get("compression", {})}.get("exchange")) for p in plans
    }
    wanted = ["auto", "gather", "dense_masked", "auto_time", "sharded", "hierarchical"]
    assert {("dgc", one) for one in wanted} <= found
    for kind in ("quantize", "local quantize"):
        assert {(kind, one) for one in ("auto", "sharded", "auto_time")} <= found
    for kind in ("topk", "muon"):
        assert {(kind, one) for one in ("auto", "gather", "sharded")} <= found
    assert {part for plan in plans for part in plan.parts} == {
        "scalar", "empty", "tied", "frozen", "late", "never", "sparse", "branch", "branch first",
        "norm",
    }  # fmt: skip
    assert any(plan.join and plan.overflows and len(plan.optimizers) == 2 for plan in plans)
