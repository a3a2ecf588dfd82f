"""Training on devices: DataParallel, DGC and LocalSGD train as they do in host memory.

Torch's device is an emulated GPU with a fake NCCL and emulated kernels: torch_devices.py.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_devices import MARKS, Stream, run_fixture  # noqa: F401 - the fixture "run"
from torch_ranks import Run, in_processes

import pycomm
from benchmarks.gpu.gpu_ranks import layer_results
from pycomm import errors
from pycomm.compress.quantized_gradients import exchange_of
from pycomm.data import ScatterLoader

pytestmark = MARKS

STEPS = 4
FEW_BITS = pycomm.Quantize(2, 4)
TOPK = pycomm.TopK(density=0.3, group=4, value_dtype="bfloat16")


class Counting(nn.Module):
    """Stores the mean of its inputs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(30))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), Counting(), nn.LayerNorm(30), nn.Linear(30, 5))


def train(device: Any, wrap: Callable[[nn.Module, Any], Any]) -> list[Tensor]:
    """The parameters and buffers after a few steps of a model that starts with rank-specific
    values."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = perceptron().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = wrap(model, optimizer)
    data = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(8, 20, generator=data).to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [x.detach().cpu() for x in (*model.parameters(), *model.buffers())]


def dense(model: nn.Module, optimizer: Any) -> Any:
    return pycomm.DataParallel(model, bucket_mb=0.001, lanes=2), optimizer


def checked(model: nn.Module, optimizer: Any) -> Any:
    module = pycomm.DataParallel(model, find_unused_parameters=True).module
    return pycomm.DataParallel(module, init="check", bucket_mb=0.001), optimizer


def compressed(**options: Any) -> Callable[[nn.Module, Any], Any]:
    def wrap(model: nn.Module, optimizer: Any) -> Any:
        dgc = pycomm.DGC(optimizer, sparsity=[0.9], min_count=0, clip_norm=1.0, **options)
        return pycomm.DataParallel(model, compression=dgc), optimizer

    return wrap


def local(model: nn.Module, optimizer: Any) -> Any:
    return model, pycomm.LocalSGD(model, optimizer, k_steps=2)


def local_compressed(
    kind: pycomm.TopK | pycomm.Quantize, **options: Any
) -> Callable[[nn.Module, Any], Any]:
    def wrap(model: nn.Module, optimizer: Any) -> Any:
        compression = dataclasses.replace(kind, **options)
        return model, pycomm.LocalSGD(model, optimizer, compression=compression)

    return wrap


def quantized(model: nn.Module, optimizer: Any) -> Any:
    return pycomm.DataParallel(model, compression=FEW_BITS, bucket_mb=0.001), optimizer


def quantized_dense(model: nn.Module, optimizer: Any) -> Any:
    """The exchange that is chosen where the link is fast."""
    parallel, _ = quantized(model, optimizer)
    exchange_of(parallel.compression)._exchanges.name = "dense"
    return parallel, optimizer


def local_muon(model: nn.Module, optimizer: Any) -> Any:
    del optimizer
    muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
    rest = torch.optim.SGD([p for p in model.parameters() if p.dim() < 2], lr=0.1)
    return model, pycomm.LocalSGD(model, rest, compression=TOPK, muon=muon)


WAYS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "dense": dense,
    "checked": checked,
    "DGC": compressed(),
    "DGC, dense_masked": compressed(exchange="dense_masked"),
    "DGC, compact": compressed(value_dtype="2bit", exchange="gather"),
    "DGC, sharded": compressed(value_dtype="2bit", exchange="sharded"),
    "DGC, fused": compressed(fused=True, select="model"),
    "LocalSGD": local,
    "Quantize": quantized,
    "Quantize, dense": quantized_dense,
    "LocalSGD, Quantize": local_compressed(FEW_BITS),
    "LocalSGD, TopK": local_compressed(TOPK),
    "LocalSGD, TopK, sharded": local_compressed(TOPK, exchange="sharded"),
    "LocalSGD, TopK, Muon": local_muon,
}


@in_processes(2)
@pytest.mark.parametrize("way", WAYS)
def test_training_equals_host_memory(at: Any, way: str) -> None:
    group = pycomm.init()
    assert (group.rank, group.size) == (dist.get_rank(), dist.get_world_size())
    there = train(at.device, WAYS[way])
    assert sum(at.counts().values()) > 0
    here = train("cpu", WAYS[way])
    for one, other in zip(there, here, strict=True):
        torch.testing.assert_close(one, other)


def train_scaled(device: Any, compress: str) -> tuple[list[Tensor], float]:
    """The parameters after steps of which one overflows on rank 0, and the scale then."""
    torch.manual_seed(0)
    rank, plain = dist.get_rank(), perceptron().to(device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=256.0, growth_interval=2)
    compression: Any = None
    if compress == "DGC":
        compression = pycomm.DGC(optimizer, sparsity=[0.9], min_count=0, scaler=scaler)
    elif compress == "Quantize":
        named = plain.named_parameters()
        compression = pycomm.QuantizedGradients(named, FEW_BITS, scaler=scaler)
    model = pycomm.DataParallel(plain, compression=compression)
    data = torch.Generator().manual_seed(rank)
    for step in range(STEPS + 2):
        x = torch.randn(8, 20, generator=data).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if (step, rank) == (2, 0):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [x.detach().cpu() for x in model.parameters()], scaler.get_scale()


@in_processes(2)
@pytest.mark.parametrize("compress", ["dense", "DGC", "Quantize"])
def test_scaled_gradients_equal_host_memory(at: Any, compress: str) -> None:
    pycomm.init()
    there, scale = train_scaled(at.device, compress)
    assert sum(at.counts().values()) > 0
    here, wanted = train_scaled("cpu", compress)
    assert scale == wanted == 512.0  # doubled, halved at the overflow, and doubled
    for one, other in zip(there, here, strict=True):
        torch.testing.assert_close(one, other)
        assert one.isfinite().all()


class Branches(nn.Module):
    """Two layers, each on its own stream."""

    def __init__(self, at: Any) -> None:
        super().__init__()
        self.at = at
        self.layers = nn.ModuleList(nn.Linear(6, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        index = self.at.index
        begin, total = Stream(index), torch.zeros(())
        for number, layer in enumerate(self.layers, 1):
            before = self.at.stream(number)
            Stream(index).wait_stream(begin)
            part = layer(x).sum()
            end = Stream(index)
            self.at.stream(before)
            Stream(index).wait_stream(end)
            total = part if number == 1 else total + part
        return total


@in_processes(2)
def test_gradients_of_several_streams_are_sent_when_all_are_ready(at: Any) -> None:
    """The copy of each gradient waits until all other possible work has run."""
    pycomm.init()
    model = Branches(at).to(at.device)
    gates: list[Callable[[], None]] = []
    x = torch.full((3, 6), dist.get_rank() + 1.0).to(at.device)
    for parameter in model.parameters():  # hooks run in the order of registration
        parameter.register_post_accumulate_grad_hook(lambda _: gates.append(at.delay()))
    parallel = pycomm.DataParallel(model)
    parallel(x).backward()
    assert len(gates) == 2
    for _ in range(2000):
        at.runtime.idle(at.module.stream(at.index))  # runs the streams
    for let_go in gates:
        let_go()
    for parameter in model.parameters():
        assert (parameter.grad.cpu() == 3 * 1.5).all(), parameter.grad.cpu()


def refused(at: Any) -> str:
    pycomm.init()
    places = ["cpu", at.device]
    with pytest.raises(errors.Mismatch, match="dtype or device") as caught:
        pycomm.DataParallel(nn.Linear(2, 2).to(places[dist.get_rank()]))
    return str(caught.value)


def test_different_device_kinds_raise(run: Run) -> None:
    assert all("'weight'" in text for text in run(2, refused))


def upper_half(x: Tensor, layer: nn.Module) -> Tensor:
    return layer(x).square().mean()


@in_processes(2)
def test_device_tensor_is_sent_and_its_gradient_is_returned(at: Any) -> None:
    """A model split over the devices of two ranks has the gradients of a single process."""
    group = pycomm.init()
    torch.manual_seed(0)
    lower, upper = nn.Linear(6, 4), nn.Linear(4, 3)
    data = torch.randn(5, 6)
    upper_half(lower(data), upper).backward()
    wanted = [x.grad.clone() for x in (lower, upper)[group.rank].parameters()]
    for there, here in (("cpu", at.device), (at.device, "cpu"), (at.device, at.device)):
        place = (there, here)[group.rank]
        model = copy.deepcopy((lower, upper)[group.rank]).to(place)
        model.zero_grad()
        if group.rank == 0:
            handle = pycomm.remote_send(model(data.to(place)), 1)
            assert handle.device == torch.device(place)
            handle.backward()
        else:
            upper_half(pycomm.remote_recv(0).to(place), model).backward()
        for found, right in zip(model.parameters(), wanted, strict=True):
            assert found.grad.device == torch.device(place)
            torch.testing.assert_close(found.grad.cpu(), right)


@in_processes(2)
def test_gradients_through_collectives_equal_host_memory(at: Any) -> None:
    group = pycomm.init()
    there = layer_results(at.device, group.rank)
    assert sum(at.counts().values()) > 0
    here = layer_results("cpu", group.rank)
    for one, other in zip(there, here, strict=True):
        torch.testing.assert_close(one, other)


@in_processes(2)
def test_rows_are_sent_from_device_to_device(at: Any) -> None:
    """Also batches in host memory; 5 rows do not divide evenly, and rank 1 gets none of 1."""
    group = pycomm.init()
    wholes = [torch.arange(rows * 4.0).reshape(rows, 4) for rows in (6, 5, 1)]
    batches = [{"x": x.to(at.device)[:, 1:3], "y": x[:, 0]} for x in wholes]
    mine = batches if group.rank == 1 else None
    at.counts()
    for x, batch in zip(wholes, ScatterLoader(mine, src=1, device=at.device), strict=True):
        rows = torch.tensor_split(x, 2)[group.rank]
        for name, wanted in (("x", rows[:, 1:3]), ("y", rows[:, 0])):
            assert batch[name].device == at.device
            assert torch.equal(batch[name].cpu(), wanted)
    counts = at.counts()
    assert sum(counts.values()) > 0  # by NCCL
    device = at.device if group.rank == 1 else None  # rank 0 has none: through host memory
    for x, batch in zip(wholes, ScatterLoader(mine, src=1, device=device), strict=True):
        assert batch["x"].device == (at.device if group.rank == 1 else torch.device("cpu"))
        assert torch.equal(batch["x"].cpu(), torch.tensor_split(x, 2)[group.rank][:, 1:3])
    assert sum(at.counts().values()) == 0
    with pytest.raises((errors.Unsupported, RuntimeError), match=r"pass torch\.view"):
        wrong = [batches[0]["x"].to(torch.complex64)] if group.rank == 1 else None
        list(ScatterLoader(wrong, src=1, device=at.device))
