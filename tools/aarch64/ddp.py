"""One of two ranks: DDP over the backend for torch.distributed gives both the same model."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycomm.torch_backend  # noqa: F401 - registers the backend; the package is not installed

dist.init_process_group("pycomm")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = last = None
inputs, targets = torch.randn(16, 8), torch.randn(16, 4)
for _ in range(10):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    first = loss.item() if first is None else first
assert loss.item() < first
weights = [torch.empty(4, 8) for _ in range(2)]
dist.all_gather(weights, model.module.weight.detach())
assert torch.equal(weights[0], weights[1])
dist.destroy_process_group()
