"""What one training step on a device costs the host, at most: the waits for the device, the copies
between the device and host memory that is not pinned, and the launches of pycomm's kernels.

The step is that of a model of six parameters, on two ranks with emulated devices. The emulator
counts; operations of torch are not launches here, and `Work.wait_for_device`, which asks instead of
waiting, is no wait. A figure that falls is printed: set it.
"""

from collections.abc import Callable
from typing import Any

import programs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch_devices import MARKS, run_fixture  # noqa: F401 - the fixture "run"
from torch_ranks import Run

import pycomm

pytestmark = MARKS

# way: (waits, copies, launches), and the same with a GradScaler
CEILINGS = {
    "dense": ((0, 0, 0), (3, 1, 0)),
    "DGC, raw": ((0, 0, 5), (4, 2, 5)),
    "DGC, coded, gather": ((2, 2, 18), (6, 4, 18)),
    "DGC, coded, owners": ((12, 7, 55), (16, 9, 55)),
    "Quantize": ((1, 1, 5), (5, 3, 5)),
    "TopK, gather": ((2, 2, 24), (3, 3, 24)),
    "TopK, owners": ((5, 5, 47), (6, 6, 47)),
}
WARM_STEPS = 3  # allocations and comparisons of first calls are behind them

Wrap = Callable[[nn.Module, torch.optim.Optimizer, Any], tuple[nn.Module, Any]]


def data_parallel(compression: Callable[[nn.Module, Any, Any], Any]) -> Wrap:
    def wrap(model: nn.Module, optimizer: Any, scaler: Any) -> tuple[nn.Module, Any]:
        made = compression(model, optimizer, scaler)
        return pycomm.DataParallel(model, compression=made), optimizer

    return wrap


def dgc(**options: Any) -> Wrap:
    return data_parallel(
        lambda _, optimizer, scaler: pycomm.DGC(
            optimizer, sparsity=[0.99], min_count=0, scaler=scaler, **options
        )
    )


def topk(exchange: str) -> Wrap:
    def wrap(model: nn.Module, optimizer: Any, _: Any) -> tuple[nn.Module, Any]:
        compression = pycomm.TopK(density=0.05, exchange=exchange)
        return model, pycomm.LocalSGD(model, optimizer, compression=compression)

    return wrap


WAYS: dict[str, Wrap] = {
    "dense": data_parallel(lambda *_: None),
    "DGC, raw": dgc(codec="raw", exchange="gather"),
    "DGC, coded, gather": dgc(value_dtype="2bit", exchange="gather"),
    "DGC, coded, owners": dgc(value_dtype="2bit", exchange="sharded"),
    "Quantize": data_parallel(
        lambda model, _, scaler: pycomm.QuantizedGradients(
            model.named_parameters(), pycomm.Quantize(2, exchange="sharded"), scaler=scaler
        )
    ),
    "TopK, gather": topk("gather"),
    "TopK, owners": topk("sharded"),
}


def cost_of_a_step(at: Any, way: str, scaled: bool) -> tuple[int, int, int]:
    """(waits, copies, launches) of the step after the first ones."""
    pycomm.init()
    torch.manual_seed(0)
    layers = (nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 10))
    model = nn.Sequential(*layers).to(at.device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(at.device.type, init_scale=8.0) if scaled else None
    wrapped, stepped = WAYS[way](model, optimizer, scaler)
    made = torch.Generator().manual_seed(dist.get_rank())
    emulated = programs.emulated()

    def counts() -> tuple[int, int, int]:
        _, _, launches = emulated.take_traffic()
        waits = emulated.runtime.waits() + at.module.waits()
        return waits, at.module.copies(), launches

    x = torch.randn(8, 40, generator=made).to(at.device)
    for step in range(WARM_STEPS + 1):
        if step == WARM_STEPS:
            before = counts()
        optimizer.zero_grad()
        loss = wrapped(x).square().mean()
        if scaler is None:
            loss.backward()
            stepped.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(stepped)
            scaler.update()
    after = counts()
    assert emulated.runtime.lazy_launches() == 0, "kernels loaded beside those of NCCL"
    return after[0] - before[0], after[1] - before[1], after[2]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_costs_at_most(run: Run, way: str, scaled: bool) -> None:
    ceiling = CEILINGS[way][scaled]
    for found in run(2, cost_of_a_step, way, scaled):
        if found != ceiling:
            print(f"{way}: a step has {found} (waits, copies, launches), the table {ceiling}")
        assert all(one <= most for one, most in zip(found, ceiling, strict=True)), found
