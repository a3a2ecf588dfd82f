"""DGC's states: resumed bit for bit, by another number of ranks, rejected if incompatible."""

import copy
from typing import Any

import pytest
import torch
from dgc_training import compressed, memory_of, same_memory
from on_ranks import on_ranks
from small_models import batch, equal, parameters, perceptron, step_on
from torch import Tensor, nn

import pycomm
from pycomm.compress.dgc import compressor_of
from pycomm.errors import InvalidArgument
from pycomm.testing import run_ranks


@pytest.mark.parametrize("after", [1, 2, 6])
def test_resume_with_another_number_of_ranks(after: int) -> None:
    """The residual is kept: the sum of v over the number of ranks. Each rank gets the mean of u."""

    def first(group: pycomm.Group) -> Any:
        module = perceptron()
        model, optimizer, dgc = compressed(module, sparsity=[0.8])
        for step in range(4):
            step_on(model, batch(group.rank, step), optimizer)
        total = [
            pycomm.all_reduce(x.double(), "avg") for pair in memory_of(dgc).values() for x in pair
        ]
        return dgc.gather_state(), module.state_dict(), total

    state, weights, wanted = run_ranks(4, first)[0]

    def second(group: pycomm.Group) -> list[Tensor]:
        module = perceptron()
        model, optimizer, dgc = compressed(module, sparsity=[0.8])
        module.load_state_dict(weights)
        dgc.load_state_dict(copy.deepcopy(state))
        assert dgc.stats()["step"] == 4
        loaded = [x.double() for pair in memory_of(dgc).values() for x in pair]
        torch.testing.assert_close([pycomm.all_reduce(x, "avg") for x in loaded], wanted)
        assert all(bool(x.any()) for x in loaded)
        for step in range(4, 8):
            step_on(model, batch(group.rank, step), optimizer)
        assert dgc.stats()["exchange"] == (
            "dense_masked" if after == 6 else "gather"
        )  # counted again
        return parameters(module)

    results = run_ranks(after, second)
    assert all(equal(result, results[0]) for result in results)


def test_loaded_state_contains_nothing_of_a_failed_pass() -> None:
    def stop(_: Tensor) -> None:
        raise ArithmeticError

    def program(group: pycomm.Group) -> None:
        module = perceptron()
        model, optimizer, dgc = compressed(module, {"bucket_layers": 1})
        step_on(model, batch(group.rank, 0), optimizer)
        own, before = dgc.state_dict(), memory_of(dgc)
        handle = module[0].weight.register_hook(stop)
        with pytest.raises(ArithmeticError):
            step_on(model, batch(group.rank, 1), optimizer)
        handle.remove()
        assert not same_memory(before, memory_of(dgc))
        dgc.load_state_dict(own)
        model(batch(group.rank, 1)[0])  # the next pass ends the failed one
        assert same_memory(before, memory_of(dgc))

    run_ranks(2, program)


@on_ranks(2)
@pytest.mark.parametrize("method", ["state_dict", "gather_state", "detach"])
def test_failed_pass_returns_to_the_residual_before_the_next(
    group: pycomm.Group, method: str
) -> None:
    """P3: unsent values return to the residual, as after the next forward. During the pass the call
    is rejected."""

    def broken() -> tuple[nn.Module, nn.Module, torch.optim.SGD, pycomm.DGC]:
        module = perceptron()
        model, optimizer, dgc = compressed(module, {"bucket_layers": 1})
        step_on(model, batch(group.rank, 0), optimizer)
        refused = []

        def stop(_: Tensor) -> None:
            with pytest.raises(InvalidArgument, match=f"{method}.* inside backward"):
                getattr(dgc, method)()
            refused.append(True)
            raise ArithmeticError

        handle = module[0].weight.register_hook(stop)
        with pytest.raises(ArithmeticError):
            step_on(model, batch(group.rank, 1), optimizer)
        handle.remove()
        assert refused
        return module, model, optimizer, dgc

    _, model, _, dgc = broken()
    half = memory_of(dgc)
    model(batch(group.rank, 1)[0])  # the next pass ends the failed one
    wanted = memory_of(dgc)
    assert not same_memory(half, wanted)
    module, _, optimizer, dgc = broken()
    state = getattr(dgc, method)()
    if method == "detach":
        for name, p in module.named_parameters():
            velocity = pycomm.all_reduce(wanted[name][0].clone(), "avg")
            assert equal([optimizer.state[p]["momentum_buffer"].flatten()], [velocity])
        return
    assert same_memory(wanted, memory_of(dgc))
    own = state if method == "state_dict" else state and state["ranks"][0]
    for name, (_, v) in wanted.items() if own else ():
        assert equal([own["v"][name]], [v])


@on_ranks(2)
@pytest.mark.parametrize("fused", [False, True])
def test_groups_are_read_after_the_optimizer_was_loaded(group: pycomm.Group, fused: bool) -> None:
    """Torch then creates new ones; schedulers write to those."""
    module = perceptron()
    model, optimizer, dgc = compressed(module, fused=fused)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0].update(lr=0.0, momentum=0.5)
    before = parameters(module)
    step_on(model, batch(group.rank, 0), optimizer)
    assert equal(before, parameters(module))
    memories = compressor_of(dgc).state.memories.values()
    assert {memory.hyper.momentum for memory in memories} == {0.5}


@on_ranks(2)
def test_incompatible_states(group: pycomm.Group) -> None:
    model, optimizer, dgc = compressed(perceptron())
    own = dgc.state_dict()
    before = memory_of(dgc)
    wrong = [
        {**own, "version": 7},
        {**own, "rank": 1 - group.rank},
        {**own, "size": 3},
        {**own, "u": {name: x[:-1] for name, x in own["u"].items()}},
        {**own, "v": {}},
    ]
    for state in wrong:
        with pytest.raises(InvalidArgument):
            dgc.load_state_dict(state)
    assert same_memory(before, memory_of(dgc))
    dgc.load_state_dict({**own, "exchange": {0: "dense_masked"}})
    step_on(model, batch(group.rank, 0), optimizer)
    assert dgc.stats()["exchange"] == "dense_masked"  # as chosen, not counted again
