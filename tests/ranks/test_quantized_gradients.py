"""Training with compression=Quantize(), in DataParallel and as a hook of DDP: gradients,
dtypes and bytes. Ranks are threads; DDP runs in processes. States: test_quantized_states.py; loss
scales and failures: test_compression_contract.py.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from quantized_training import adam, wide
from small_models import batch, equal, parameters
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import Run, in_processes, run_fixture  # noqa: F401 - a fixture

import pycomm
from pycomm import reference
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.testing import run_ranks

FORMS: list[dict[str, Any]] = [{}, {"bucket_layers": 1}, {"bucket_mb": 1e-4}, {"lanes": 2}]


def mean_gradients(ranks: int, steps: int, quantize: pycomm.Quantize) -> list[list[np.ndarray]]:
    """A model in NumPy: the mean gradients of each step at fixed parameters."""
    model = wide()
    shapes = [p.numel() for p in model.parameters()]
    residuals = [[np.zeros(n, np.float32) for n in shapes] for _ in range(ranks)]
    owned = [np.zeros(n, np.float32) for n in shapes]
    found = []
    for step in range(steps):
        totals = [np.zeros(n, np.float32) for n in shapes]
        for rank in range(ranks):
            model.zero_grad()
            x, y = batch(rank, step)
            F.mse_loss(model(x), y).backward()
            for i, p in enumerate(model.parameters()):
                assert p.grad is not None
                packet, residuals[rank][i] = reference.quantize(
                    p.grad.flatten().numpy(), quantize.bits, residuals[rank][i]
                )
                totals[i] = totals[i] + reference.dequantize(packet, shapes[i], quantize.bits)
        means = []
        for i, total in enumerate(totals):
            packet, owned[i] = reference.quantize(total, quantize.down_bits, owned[i])
            sent = reference.dequantize(packet, shapes[i], quantize.down_bits)
            means.append(sent * np.float32(1 / ranks))
        found.append(means)
    return found


@on_ranks("ranks")
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_those_of_the_model_in_all_buckets(
    group: pycomm.Group, ranks: int, form: dict[str, Any]
) -> None:
    quantize = pycomm.Quantize(2, 4)
    model = pycomm.DataParallel(wide(), compression=quantize, **form)
    found = []
    for step in range(3):
        model.zero_grad()
        x, y = batch(group.rank, step)
        F.mse_loss(model(x), y).backward()
        found.append([p.grad.flatten().numpy().copy() for p in model.parameters()])
    for got, want in zip(found, mean_gradients(ranks, 3, quantize), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


class Sums(nn.Module):
    """Weights of float64 and bfloat16, whose gradients are x / 3 and x."""

    def __init__(self) -> None:
        super().__init__()
        self.exact = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.low = nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.exact.sum() / 3 + self.low.sum().double()) * x


@on_ranks(2)
def test_float64_is_exact_and_bfloat16_is_quantized(group: pycomm.Group) -> None:
    module = Sums()
    model = pycomm.DataParallel(module, compression=pycomm.Quantize(8, 8))
    model(torch.tensor(group.rank + 1.0, dtype=torch.float64)).backward()
    assert list(model.compression.state_dict()["residual"]) == ["low"]
    exact, low = module.exact.grad, module.low.grad
    torch.testing.assert_close(exact, torch.full_like(exact, 0.5), rtol=1e-15, atol=0)
    torch.testing.assert_close(low, torch.full_like(low, 1.5), atol=0.02, rtol=0)


def test_bytes_of_a_step() -> None:
    def program(group: pycomm.Group) -> tuple[int, int, int]:
        layer = nn.Linear(512, 256, bias=False)
        model = pycomm.DataParallel(layer, compression=pycomm.Quantize(), broadcast_buffers=False)
        for _ in range(2):
            before = group.stats().bytes_written
            model(torch.ones(1, 512)).sum().backward()
        stats = model.compression.stats()
        return group.stats().bytes_written - before, stats["sent_bytes"], stats["dense_bytes"]

    ranks = run_ranks(4, program)
    wanted = 3 * 512 * 256 * 11 / 8
    assert wanted <= sum(rank[0] for rank in ranks) <= 1.03 * wanted
    assert ranks[0][2] == 4 * 512 * 256
    assert ranks[0][1] == pytest.approx(512 * 256 * (0.75 * 3 + 0.25 * 8) / 8, rel=0.01)


@on_ranks(1)
def test_wrong_arguments(group: pycomm.Group) -> None:
    module = wide()
    with pytest.raises(InvalidArgument):
        pycomm.QuantizedGradients(module.named_parameters(), "3bit")
    with pytest.raises(Unsupported):
        pycomm.QuantizedGradients([("w", torch.ones(3, device="meta"))])
    quantized = pycomm.QuantizedGradients(list(module.named_parameters())[:2])
    with pytest.raises(InvalidArgument, match="named_parameters"):
        pycomm.DataParallel(module, compression=quantized, group=group)


def _hook(buckets: float) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """The parameters after training with DDP's hook, and with DataParallel."""
    rank, found = dist.get_rank(), []
    for wrapped in ("ddp", "pycomm"):
        module = wide()
        quantized = pycomm.QuantizedGradients(module.named_parameters(), pycomm.Quantize(2, 4))
        if wrapped == "ddp":
            model: Any = DistributedDataParallel(module, bucket_cap_mb=buckets)
            model.register_comm_hook(quantized, pycomm.quantize_hook)
        else:
            model = pycomm.DataParallel(module, compression=quantized)
        optimizer = adam(model)
        for step in range(4):
            if step == 2:
                with model.no_sync():
                    F.mse_loss(model(batch(rank, 9)[0]), batch(rank, 9)[1]).backward()
            x, y = batch(rank, step)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(parameters(module))
    return found[0], found[1], quantized.stats()


@in_processes(1)
@pytest.mark.parametrize("name", ["dgc", "quantize"])
def test_the_hook_of_ddp_names_what_to_use_after_a_change_of_the_group(name: str) -> None:
    """With a process group and a DDP that were made anew, and the hook's state of before."""
    module = wide()
    state: Any = pycomm.DGC(torch.optim.SGD(module.parameters(), lr=0.1))
    if name == "quantize":
        state = pycomm.QuantizedGradients(module.named_parameters())
    x, y = batch(0, 0)
    for changed in (False, True):
        ddp = DistributedDataParallel(module)
        ddp.register_comm_hook(state, getattr(pycomm, f"{name}_hook"))
        loss = F.mse_loss(ddp(x), y)
        if changed:
            with pytest.raises(InvalidArgument, match=r"pycomm\.DataParallel\(model, compression="):
                loss.backward()
            return
        loss.backward()
        del ddp
        pycomm.init().shrink()
        dist.destroy_process_group()
        dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("buckets", [25, 0.01])
@pytest.mark.parametrize("size", [2, 4])
def test_the_hook_of_ddp_equals_data_parallel(run: Run, size: int, buckets: float) -> None:
    results = run(size, _hook, buckets)
    assert results[0][2]["step"] == 4
    for ddp, parallel, _ in results:
        assert equal(ddp, parallel)
        assert equal(ddp, results[0][0])
