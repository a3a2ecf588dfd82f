"""FSDP2 on two dimensions, shards and replicas, with quantized gradients between replicas.

The functions `_...` run in the processes of torch_ranks.py, as a mesh of 2 replicas x 2 shards.
"""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hsdp_training import backward, full_parts, local_parts, mesh_of, sharded
from quantized_training import adam, check_accumulated, wide
from small_models import batch, equal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch_ranks import Run, in_processes, run_fixture  # noqa: F401 - a fixture
from update_training import residuals_of

import pycomm
from pycomm.errors import InvalidArgument


def _quantized(
    compression: pycomm.Quantize, **options: Any
) -> tuple[Any, pycomm.QuantizedGradients, DeviceMesh]:
    """Replicas that differ until they take the parameters of the first one."""
    mesh = mesh_of()
    model = sharded(mesh["shard"], wide(1 + mesh.get_local_rank("replicate")))
    return model, pycomm.quantize_hsdp(model, mesh["replicate"], compression, **options), mesh


def _train(bits: Any) -> Any:
    """Parameters and statistics after five steps; with bits None they are exact."""
    quantized = None
    if bits is None:
        model = sharded(mesh_of(), wide())
    else:
        model, quantized, _ = _quantized(pycomm.Quantize(*bits))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(5):
        backward(model, step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        assert norm.full_tensor().item() > 0  # type: ignore[attr-defined]  # a DTensor
        optimizer.step()
        optimizer.zero_grad()
    return full_parts(model), quantized and quantized.stats()


@pytest.mark.parametrize("bits", [(8, 8), (3, 8)])
def test_replicas_are_equal_and_close_to_exact_training(run: Run, bits: tuple[int, int]) -> None:
    exact = run(4, _train, None)[0][0]
    start = [p.detach() for p in wide().parameters()]
    results = run(4, _train, bits)
    for found, stats in results:
        assert equal(found, results[0][0])
        assert stats["step"] == 5
        for got, wanted, first in zip(found, exact, start, strict=True):
            moved = float((wanted - first).norm())
            assert float((got - wanted).norm()) < (0.1 if bits[0] == 8 else 0.5) * moved
    for shard in range(2):  # each element is sent to its owner and back once
        sent = sum(results[shard + replica][1]["sent_bytes"] for replica in (0, 2))
        assert sent < 1.05 * results[shard][1]["dense_bytes"] * sum(bits) / 32


def _conserved() -> Any:
    model, quantized, mesh = _quantized(pycomm.Quantize(2, 3))
    group = mesh["shard"].get_group()
    plain = wide(1)
    given: dict[str, Any] = {}
    arrived: dict[str, Any] = {}
    for step in range(4):
        model.zero_grad()
        backward(model, step)
        plain.zero_grad()
        backward(plain, step)
        for (name, p), exact in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert exact.grad is not None
            assert p.grad is not None
            dist.all_reduce(exact.grad, dist.ReduceOp.AVG, group=group)  # of one replica
            whole = exact.grad.double()
            local = p.grad.to_local().double()  # type: ignore[attr-defined]  # a DTensor
            mine = whole.chunk(2)[dist.get_rank(group)]
            given[name] = given.get(name, 0.0) + mine.flatten()
            arrived[name] = arrived.get(name, 0.0) + 2 * local.flatten()
    return given, arrived, quantized.gather_state(), quantized.gather_state(1)


def test_feedback_conserves_the_gradients(run: Run) -> None:
    """For each shard: what arrived, times two replicas, plus residuals is all that was given."""
    results = run(4, _conserved)
    for shard in range(2):
        first, second = results[shard], results[2 + shard]  # the replicas of this shard
        assert second[2] is None
        assert second[3] is not None
        names = list(first[0])
        replicas = [
            {key: [one[key][name] for name in names] for key in ("residual", "owner_residual")}
            | {"rank": one["rank"], "size": one["size"]}
            for one in first[2]["ranks"]
        ]
        for name, *lost in zip(names, *map(residuals_of, replicas), strict=True):
            count = len(first[0][name])
            residual = sum(x[:count].double() for x in lost)  # without padding
            assert float(residual.abs().sum()) > 1e-5
            given = first[0][name] + second[0][name]
            torch.testing.assert_close(first[1][name] + residual, given, atol=1e-4, rtol=0)


def _resumed(steps: int, states: bytes | None) -> Any:
    model, quantized, _ = _quantized(pycomm.Quantize(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if states is not None:
        weights, own = pickle.loads(states)[dist.get_rank()]
        for p, saved in zip(model.parameters(), weights, strict=True):
            p.detach().to_local().copy_(saved)  # type: ignore[attr-defined]  # a DTensor
        quantized.load_state_dict(own)
    for step in range(quantized.stats()["step"], steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return local_parts(model), quantized.state_dict()


def test_a_state_resumes_bit_for_bit(run: Run) -> None:
    whole = run(4, _resumed, 5, None)
    states = pickle.dumps(run(4, _resumed, 3, None))
    for (found, state), (wanted, _) in zip(run(4, _resumed, 5, states), whole, strict=True):
        assert equal(found, wanted)
        assert (state["size"], state["step"]) == (2, 5)


def _hooked(x: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    """The identity, with a hook for its gradient."""
    x = x.clone()
    x.register_hook(hook)
    return x


def _overflowed(gradient: Tensor) -> Tensor:
    """The same, but for the first element."""
    gradient = gradient.clone()
    gradient[0, 0] = float("inf")
    return gradient


@in_processes(4)
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    """Steps that were skipped. In step 1 one rank's gradient of the first shard overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, quantized, _ = _quantized(pycomm.Quantize(), scaler=scaler)
    optimizer, skipped, bad = adam(model), [], False

    def overflow(layer: Any, inputs: Any, output: Tensor) -> Tensor:
        weight = _hooked(layer.weight, _overflowed) if bad else layer.weight
        return F.linear(inputs[0], weight, layer.bias)

    model[4].register_forward_hook(overflow)
    for step in range(3):
        bad = step == 1 and dist.get_rank() == 3
        before, weights = quantized.state_dict(), local_parts(model)
        optimizer.zero_grad()
        x, y = batch(dist.get_rank(), step)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(equal(weights, local_parts(model)))
        if skipped[-1]:
            after = quantized.state_dict()
            assert after["step"] == before["step"]
            for key in ("residual", "owner_residual"):
                assert equal([*after[key].values()], [*before[key].values()])
    assert skipped == [False, True, False]


def _accumulated() -> Any:
    model, quantized, _ = _quantized(pycomm.Quantize(8, 8))
    model.set_requires_gradient_sync(False)
    backward(model, 0)
    assert quantized.stats()["step"] == 0
    model.set_requires_gradient_sync(True)
    backward(model, 1)
    assert quantized.stats()["step"] == 1
    return [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]  # a DTensor


def test_accumulation_exchanges_the_sum_once(run: Run) -> None:
    check_accumulated(run(4, _accumulated))


class Broken(Exception):
    """The error of a loss."""


def _fail(gradient: Tensor) -> None:
    raise Broken


@in_processes(4)
def test_a_failed_pass_changes_no_residual() -> None:
    """A backward pass fails on all ranks after the last layer was exchanged."""
    model, quantized, _ = _quantized(pycomm.Quantize(2, 2))
    failing = False
    model[1].register_forward_hook(
        lambda layer, inputs, output: _hooked(output, _fail) if failing else output
    )
    backward(model, 0)
    before, failing = quantized.state_dict(), True
    with pytest.raises(Broken):
        backward(model, 1)
    assert quantized.stats()["sent_bytes"] > 0
    after = quantized.state_dict()
    assert after["step"] == before["step"] == 1
    for key in ("residual", "owner_residual"):
        assert equal([*after[key].values()], [*before[key].values()])


@in_processes(4)
def test_wrong_arguments_name_what_to_use() -> None:
    mesh = mesh_of()
    for model, replicas, message in (
        (wide(), mesh["replicate"], "DataParallel"),
        (sharded(mesh, wide()), mesh["replicate"], "itself"),
        (sharded(mesh["shard"], wide()), mesh, "dimensions"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            pycomm.quantize_hsdp(model, replicas)
    with pytest.raises(InvalidArgument, match="Quantize"):
        pycomm.quantize_hsdp(
            sharded(mesh["shard"], wide()), mesh["replicate"], pycomm.TopK(ratio=50)
        )  # type: ignore[arg-type]  # refused
    model = sharded(mesh["shard"], wide())
    pycomm.quantize_hsdp(model, mesh["replicate"])
    model[4].register_forward_hook(
        lambda layer, inputs, output: F.linear(inputs[0], layer.weight)  # without bias
    )
    with pytest.raises(InvalidArgument, match="must get one"):
        backward(model, 0)
