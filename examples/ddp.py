"""torch's DistributedDataParallel with the backend "pycomm"; nothing else is specific to pycomm.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py

Prints

    epoch 0: loss 1.3228, 70.5% of the test set right
    epoch 2: loss 0.2670, 85.5% of the test set right
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 3


def samples(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(1))


def evaluate(model: nn.Module, data: TensorDataset) -> float:
    """The share of correct predictions over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = range(rank, len(data), size)  # each sample once, without padding
    with torch.no_grad():
        predicted = model(torch.stack([data[i][0] for i in own])).argmax(1)
    labels = torch.stack([data[i][1] for i in own])
    found = [torch.empty_like(predicted) for _ in range(size)]
    dist.all_gather(found, predicted)  # by rank, for results per sample
    right = (predicted == labels).sum()
    dist.all_reduce(right, op=dist.ReduceOp.SUM)  # for a metric
    assert sum(len(part) for part in found) == len(data)
    return right.item() / len(data)


def main() -> None:
    dist.init_process_group("pycomm")  # was "gloo" or "nccl"
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)  # takes rank 0's parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    train = samples(512, seed=1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.reduce(total, dst=0)
        right = evaluate(net, samples(200, seed=2))
        if rank == 0:
            mean = total.item() / len(loader) / dist.get_world_size()
            print(f"epoch {epoch}: loss {mean:.4f}, {right:.1%} of the test set right")
    if rank == 0:
        torch.save(net.state_dict(), "ddp.pt")
    dist.barrier()
    net.load_state_dict(torch.load("ddp.pt"))
    dist.barrier()
    if rank == 0:
        os.remove("ddp.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
