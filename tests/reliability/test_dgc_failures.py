"""Steps of DGC that lose a rank, or are interrupted by Ctrl-C.

Other failures of a step: test_compression_contract.py. Survivors that continue: test_shrink.py.
"""

import signal
from typing import Any

import pytest
import torch
from dgc_training import compressed, memory_of
from small_models import batch, equal, parameters, perceptron, step_on
from torch import Tensor
from torch.nn import functional as F

import pycomm
from pycomm.compress import step as steps
from pycomm.compress.dgc import compressor_of
from pycomm.errors import Error
from pycomm.testing import FaultPlan, run_ranks

COMPACT = {"value_dtype": "3bit", "exchange": "gather"}
SPLIT, SOME_DENSE = {"exchange": "sharded"}, {"min_count": 600}


def test_rank_failure_during_the_exchange_changes_no_state() -> None:
    """Rank 1's connection is closed within a step: rank 0 rolls back."""

    def program(group: pycomm.Group) -> None:
        module = perceptron()
        model, optimizer, dgc = compressed(module)
        momentum = compressor_of(dgc).state.memories
        try:
            for step in range(400):
                before = memory_of(dgc)
                weights = parameters(module)
                step_on(model, batch(group.rank, step), optimizer)
        except Error:  # of the closed connection: nothing changed
            assert equal(weights, parameters(module))
            for memory in momentum.values():
                old_u, old_v = before[memory.name]
                if not torch.equal(memory.u, old_u):  # it added the gradient
                    torch.testing.assert_close(memory.v, old_v + memory.u)
            raise
        raise AssertionError("the connection was never cut")

    faults = [FaultPlan(rank=1, action="disconnect", at="all_gather", after_bytes=30000)]
    for result in run_ranks(2, program, faults=faults, transport="tcp", return_exceptions=True):
        assert isinstance(result, Error), result


def through_ctrl_c(
    group: pycomm.Group, options: dict[str, Any], ctrl_c: bool
) -> tuple[list[Tensor], bool]:
    """Eight steps; in one of them Ctrl-C interrupts rank 0 during the commit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
    module = perceptron()
    model, optimizer, dgc = compressed(module, {"bucket_layers": 1}, **options)
    real, came = steps.apply_momentum, False

    def interrupt(*args: Any) -> None:
        if dgc.stats()["step"] == 4 and ctrl_c and group.rank == 0:
            signal.raise_signal(signal.SIGINT)
        real(*args)

    steps.apply_momentum = interrupt
    for step in range(8):
        x, y = batch(group.rank, step)
        optimizer.zero_grad()
        try:
            F.mse_loss(model(x), y).backward()
        except KeyboardInterrupt:  # once, after the commit
            came = True
            assert dgc.stats()["step"] == 5
        optimizer.step()
    steps.apply_momentum = real
    return [*parameters(module), *(x for pair in memory_of(dgc).values() for x in pair)], came


@pytest.mark.parametrize(
    "options", [SOME_DENSE, {**SOME_DENSE, **COMPACT}, {**SOME_DENSE, **SPLIT}]
)
def test_ctrl_c_waits_for_what_a_step_commits(options: dict[str, Any]) -> None:
    """Processes: only a main thread receives it. The step completes, and the next ones continue."""
    undisturbed, interrupted = (
        run_ranks(2, through_ctrl_c, options, ctrl_c, transport="", processes=True)
        for ctrl_c in (False, True)
    )
    assert [came for _, came in [*undisturbed, *interrupted]] == [False, False, True, False]
    for (one, _), (other, _) in zip(undisturbed, interrupted, strict=True):
        assert equal(one, other)
