"""Steps of DGC that fail: in the exchange, before it and after it. Ranks are threads.

Survivors that continue: test_shrink.py. Others: test_dgc_steps.py.
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
from pycomm._training.communicators import CommunicatorPool
from pycomm.compress import step as steps
from pycomm.compress.bucket import CompressionBucket
from pycomm.compress.dgc import compressor_of
from pycomm.errors import Error
from pycomm.testing import FaultPlan, run_ranks


class Broken(Exception):
    """The error that a part of a step raises in these tests."""


COMPACT = {"value_dtype": "3bit", "exchange": "gather"}
SPLIT, SOME_DENSE = {"exchange": "sharded"}, {"min_count": 600}
CLIPPED = {**SOME_DENSE, "clip_norm": 1e6}  # no rank reaches it
# The function, and the number of its call in a step.
FAILING: list[tuple[Any, str, int, dict[str, Any]]] = [
    *(
        (CommunicatorPool, "all_gather", 1, o)
        for o in ({}, {"select": "model"}, SOME_DENSE, COMPACT)
    ),
    (CommunicatorPool, "all_reduce", 3, SOME_DENSE),
    *((CommunicatorPool, "all_gather_v", 1, o) for o in ({**COMPACT, "select": "model"}, SPLIT)),
    # After the exchange, when memory is short, for example.
    (CompressionBucket, "decode", 2, {}),
    *((CompressionBucket, "decode", 1, o) for o in (COMPACT, SPLIT)),
    (CompressionBucket, "decode", 1, SOME_DENSE),
    (steps, "clip_gradients", 1, CLIPPED),
]


@pytest.mark.parametrize(("where", "what", "call", "options"), FAILING)
def test_failed_step_sends_nothing(
    monkeypatch: pytest.MonkeyPatch, where: Any, what: str, call: int, options: dict[str, Any]
) -> None:
    """Compared with a twin whose step selects nothing: u and v contain the gradient, nothing else
    changed."""
    real = getattr(where, what)
    at, calls = [-1, -1], [0, 0]  # by rank

    def sometimes(*args: Any) -> Any:
        rank = pycomm.rank()
        calls[rank] += 1
        if calls[rank] == at[rank]:
            raise Broken
        return real(*args)

    monkeypatch.setattr(where, what, sometimes)

    def program(group: pycomm.Group, fail: bool) -> list[Tensor]:
        module = perceptron().double()
        model, optimizer, dgc = compressed(module, {"bucket_layers": 1}, **options)
        for step in range(8):
            x, y = batch(group.rank, step)
            data = x.double(), y.double()
            if step == 4 and fail:
                before, weights = memory_of(dgc), parameters(module)
                gradients = torch.autograd.grad(
                    F.mse_loss(module(data[0]), data[1]), list(module.parameters())
                )
                at[group.rank] = calls[group.rank] + call
                optimizer.zero_grad()
                with pytest.raises(Broken):
                    F.mse_loss(model(data[0]), data[1]).backward()
                at[group.rank] = -1
                pycomm.barrier()
                assert equal(weights, parameters(module))
                assert dgc.stats()["step"] == 4
                after, taken = memory_of(dgc), 0
                assert all(equal(before[n], after[n]) for n in before if "owner_residual" in n)
                for (name, old), g in zip(before.items(), gradients, strict=False):
                    if len(old) == 1:
                        assert equal(old, after[name])  # is sent dense: not touched
                        continue
                    u = torch.add(g.flatten(), old[0], alpha=0.9)
                    if torch.equal(after[name][0], old[0]):
                        assert equal(after[name], old)  # its bucket was not exchanged yet
                        continue
                    taken += 1
                    torch.testing.assert_close(after[name], [u, old[1] + u], rtol=1e-15, atol=0)
                assert taken > 0
                continue
            step_on(model, data, optimizer)
        return parameters(module)

    results = run_ranks(2, program, True)
    assert equal(*results)


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
