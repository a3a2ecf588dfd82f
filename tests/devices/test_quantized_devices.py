"""Quantized gradients, updates and arrays on devices: the bits of host memory, and their states.

Torch's device is an emulated GPU with emulated kernels: torch_devices.py.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_models import equal
from torch import Tensor, nn
from torch_devices import MARKS, run_fixture  # noqa: F401 - the fixture "run"
from torch_ranks import Run, in_processes

import pycomm

pytestmark = MARKS

FEW_BITS = pycomm.Quantize(2, 4)
COUNT = 9001  # three blocks, so that each of two ranks owns at least one


def array(step: int) -> Tensor:
    made = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(COUNT, generator=made)


def reduced(places: list[Any], op: str, states: list[Any] | None = None) -> Any:
    """The results of calls with arrays in these places, and what the state has after them."""
    state = FEW_BITS.state()
    found = []
    for step, place in enumerate(places):
        x = array(step).to(place)
        assert pycomm.all_reduce(x, op, compression=FEW_BITS, state=state) is x
        assert x.device == torch.device(place)
        found.append(x.cpu())
        if states is not None and step == 0:
            saved = state.state_dict()
            state = FEW_BITS.state()
            state.load_state_dict(saved)
    residual = state.residual()
    assert type(residual) is np.ndarray
    return [*found, torch.from_numpy(residual)]


@in_processes(2)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_all_reduce_equals_host_memory(at: Any, op: str) -> None:
    pycomm.init()
    wanted = reduced(["cpu"] * 3, op)
    for places in ([at.device] * 3, ["cpu", at.device, "cpu"]):
        assert equal(reduced(places, op), wanted)
        assert equal(reduced(places, op, []), wanted)
    x = array(0).to(at.device)
    pycomm.all_reduce(x, compression=FEW_BITS)  # without feedback
    assert not torch.equal(x.cpu(), array(0))
    few, wanted_few = (array(0)[:100].to(place) for place in (at.device, "cpu"))  # one owner
    for one in (few, wanted_few):
        pycomm.all_reduce(one, op, compression=FEW_BITS)
    assert torch.equal(few.cpu(), wanted_few)
    x[5] = float("inf") if dist.get_rank() == 1 else 1.0
    pycomm.all_reduce(x, compression=FEW_BITS)
    assert x.isnan().any()


class Products(nn.Module):
    """A sum of products of parameters and inputs: its gradients are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.zeros(count) for count in (COUNT, 40, 5000))

    def forward(self, *inputs: Tensor) -> Any:
        return sum((x * w).sum() for x, w in zip(inputs, self.factors, strict=True))


def gradients(device: Any, state: Any = None, steps: range = range(4)) -> Any:
    """(the averaged gradients of the last step, the state, the gathered state)."""
    model = Products().to(device)
    parallel = pycomm.DataParallel(model, compression=FEW_BITS, bucket_mb=0.001)
    quantized: Any = parallel.compression
    if state is not None:
        quantized.load_state_dict(state)
        loaded = quantized.state_dict()["residual"].values()
        assert all(x.device == torch.device(device) for x in loaded)
    for step in steps:
        model.zero_grad()
        made = torch.Generator().manual_seed(100 * step + dist.get_rank())
        inputs = [torch.randn(w.shape, generator=made).to(device) for w in model.factors]
        parallel(*inputs).backward()
    found = [w.grad.cpu() for w in model.factors]
    return found, quantized.state_dict(), quantized.gather_state()


def residuals(state: Any) -> list[Tensor]:
    parts = (state[key] for key in ("residual", "owner_residual"))
    return [part[name].cpu() for part in parts for name in sorted(part)]


@in_processes(2)
def test_states_equal_host_memory(at: Any) -> None:
    """Bit for bit, also of a state that is loaded on the other device."""
    group = pycomm.init()
    wanted, state, every = gradients("cpu")
    found, there, gathered = gradients(at.device)
    assert equal(found, wanted)
    assert equal(residuals(there), residuals(state))
    assert all(x.device == at.device for x in there["residual"].values())
    if group.rank == 0:
        for one, other in zip(gathered["ranks"], every["ranks"], strict=True):
            assert equal(residuals(one), residuals(other))
    for places in (("cpu", at.device), (at.device, "cpu"), (at.device, at.device)):
        _, half, _ = gradients(places[0], None, range(2))
        assert equal(gradients(places[1], half, range(2, 4))[0], wanted)


COSTS = {"Quantize": {"dense", "sharded"}, "DGC": {"dense", "dense_masked", "gather", "sharded"}}


def chooses_by_time(at: Any, name: str) -> str:
    pycomm.init()
    model = Products().to(at.device)
    compression: Any = pycomm.Quantize(exchange="auto_time")
    if name == "DGC":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compression = pycomm.DGC(
            optimizer, sparsity=0.99, min_count=0, value_dtype="2bit", exchange="auto_time"
        )
    parallel = pycomm.DataParallel(model, compression=compression)
    parallel(*(torch.ones(w.shape).to(at.device) for w in model.factors)).backward()
    stats = parallel.compression.stats()  # type: ignore[union-attr]  # not None
    assert set(stats["exchange_costs"]) == COSTS[name]
    assert all(seconds > 0 for seconds in stats["exchange_costs"].values())
    return str(stats["exchange"])


@pytest.mark.parametrize("name", COSTS)
def test_the_exchange_is_chosen_by_time_on_devices(run: Run, name: str) -> None:
    first, second = run(2, chooses_by_time, name)
    assert first == second
    assert first in COSTS[name]
