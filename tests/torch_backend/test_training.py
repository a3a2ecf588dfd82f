"""Training methods of torch, unchanged on pycomm: DDP with its hooks, compiled and with uneven
inputs, ZeRO, pipelines and checkpoints. Each compared with gloo, and with one process.

The functions `_...` run in the processes of torch_ranks.py.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_models import alone, batch, parameters, perceptron, step_on
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

# pytest finds the fixtures by name, so that they look unused.
from torch_ranks import (  # noqa: F401 - a fixture
    SIZES,
    Run,
    both_fixture,
    run_fixture,
    same,
)

STEPS = 3


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def _alone(ranks: int) -> list[torch.Tensor]:
    """The result of one process for the batches of all ranks."""
    return alone(perceptron(), STEPS, ranks, _adam)


def _ddp(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    for step in range(STEPS):
        step_on(model, batch(dist.get_rank(), step), optimizer)
    return parameters(model)


def _zero() -> list[list[torch.Tensor]]:
    """ZeRO and plain Adam, which must be equal bit by bit; and its state, gathered on rank 0."""
    plain = DistributedDataParallel(perceptron())
    wanted = _ddp(plain, _adam(plain))
    results = [wanted]
    for overlap in (False, True):  # parameters_as_bucket_view
        model = DistributedDataParallel(perceptron())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=torch.optim.Adam,
            lr=0.02,
            parameters_as_bucket_view=overlap,
        )
        got = _ddp(model, optimizer)
        for a, b in zip(got, wanted, strict=True):
            same(a, b, "ZeRO equals Adam")
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            assert len(optimizer.state_dict()["state"]) == len(got)
        results.append(got)
    return results


@SIZES
def test_zero_equals_adam(both: Run, size: int) -> None:
    for results in both(size, _zero):
        torch.testing.assert_close(results[0], _alone(size), rtol=1e-4, atol=1e-5)


def _bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook, which DDP rejects under its own name without a GPU."""
    return default_hooks.bf16_compress_hook(state, bucket)


HOOKS = {"plain": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}
HOOKS["bf16"] = _bf16


def _hooks() -> dict[str, list[torch.Tensor]]:
    found = {}
    for name, hook in HOOKS.items():
        model = DistributedDataParallel(perceptron())
        model.register_comm_hook(None, hook)
        found[name] = _ddp(model, _adam(model))
    return found


@SIZES
def test_ddp_with_compressing_hooks(run: Run, size: int, both: Run) -> None:
    """16-bit sums of more than two ranks are rounded once here and at each step in gloo."""
    everyone = (both if size == 2 else run)(size, _hooks)
    wanted = _alone(size)
    loose = {"plain": 1e-5, "fp16": 0.02, "bf16": 0.06}
    for found in everyone:
        for name, got in found.items():
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=loose[name])
            for mine, first in zip(got, everyone[0][name], strict=True):
                same(mine, first, (name, "ranks agree"))


def _power_sgd() -> list[torch.Tensor]:
    model = DistributedDataParallel(perceptron())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _ddp(model, _adam(model))


@SIZES
def test_power_sgd_callbacks_wait_for_calls(run: Run, size: int) -> None:
    """On pycomm only: gloo ends the process when a callback is the last to hold its group."""
    everyone = run(size, _power_sgd)
    for got in everyone:
        torch.testing.assert_close(got, _alone(size), rtol=1e-4, atol=0.1)
        for mine, first in zip(got, everyone[0], strict=True):
            same(mine, first, "ranks agree")


class _Wide(nn.Module):
    """More than two of DDP's buckets. A custom class: the compiler skips torch's containers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(16, 600), nn.Linear(600, 3)
        self.inner = nn.ModuleList(nn.Linear(600, 600) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.inner:
            x = layer(x).tanh()
        return self.last(x)


def _compiled() -> list[list[torch.Tensor]]:
    """A compiled DDP model, split at DDP's buckets into graphs, and the same uncompiled."""
    results = []
    for compiled in (False, True):
        model = DistributedDataParallel(_Wide(), bucket_cap_mb=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, _inputs: Any, graphs: Any = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        called = torch.compile(model, backend=keep) if compiled else model
        for step in range(STEPS):
            step_on(called, batch(dist.get_rank(), step), optimizer)
        assert len(graphs) >= 2 * compiled
        results.append(parameters(model))
    torch.testing.assert_close(*results)
    return results


def test_compiled_ddp(both: Run) -> None:
    both(2, _compiled)


def _uneven() -> list[torch.Tensor]:
    """Rank r has r + 2 batches; a rank without more data shadows the others' collectives."""
    rank = dist.get_rank()
    model = DistributedDataParallel(perceptron())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.05
    )
    with Join([model, optimizer]):
        for step in range(rank + 2):
            step_on(model, batch(rank, step), optimizer)
    return parameters(model)


@SIZES
def test_uneven_inputs_under_join(both: Run, size: int) -> None:
    everyone = both(size, _uneven)
    for got in everyone:
        for mine, first, before in zip(got, everyone[0], parameters(perceptron()), strict=True):
            same(mine, first, "ranks agree")
            assert not torch.equal(mine, before)


def _pipeline() -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    for schedule in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(size)]
        x, y = torch.randn(8, 8), torch.randn(8, 8)
        stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
        run = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        losses: list[torch.Tensor] = []
        if rank == 0:
            run.step(x)
        elif rank == size - 1:
            run.step(target=y, losses=losses)
        else:
            run.step()
        gradients = [p.grad.clone() for p in layers[rank].parameters() if p.grad is not None]
        assert len(gradients) == 2
        for layer in layers:
            layer.zero_grad()
        nn.functional.mse_loss(nn.Sequential(*layers)(x), y).backward()
        for got, parameter in zip(gradients, layers[rank].parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad)
        results += gradients
    return results


@SIZES
def test_pipelines_equal_one_process(both: Run, size: int) -> None:
    both(size, _pipeline)


WHOLE = torch.arange(10 * 3.0).reshape(10, 3)


def _state(fill: float | None) -> dict[str, Any]:
    """A state with a sharded tensor, a replicated one and a number."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = WHOLE if fill is None else torch.full_like(WHOLE, fill)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    replicated = torch.arange(4.0) if fill is None else torch.full((4,), fill)
    return {"sharded": sharded, "replicated": replicated, "step": 7 if fill is None else 0}


def _save(folder: str) -> None:
    dcp.save(_state(None), checkpoint_id=f"{folder}/now")
    own = dist.new_group()  # a thread saves: it must not use the order of this thread's calls
    saving = dcp.async_save(_state(None), checkpoint_id=f"{folder}/later", process_group=own)
    x = torch.ones(3)
    for _ in range(20):
        dist.all_reduce(x, dist.ReduceOp.AVG)
    saving.result()  # type: ignore[union-attr]  # a Future, as requested
    assert (x == 1).all()


def _load(folder: str) -> None:
    for name in ("now", "later"):
        state = _state(-1.0)
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        assert isinstance(state["sharded"], DTensor)
        same(state["sharded"].full_tensor(), WHOLE, name)
        same(state["replicated"], torch.arange(4.0), name)
        assert state["step"] == 7


def test_checkpoint_saved_by_two_loaded_by_three(run: Run, tmp_path: Path) -> None:
    run(2, _save, str(tmp_path / "checkpoints"))
    run(2, _load, str(tmp_path / "checkpoints"))
    run(3, _load, str(tmp_path / "checkpoints"))
