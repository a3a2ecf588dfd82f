"""Trains a small network on several processes, which end with equal parameters.

    torchrun --standalone --nproc-per-node 2 examples/data_parallel.py

Prints

    step 50: loss 0.0260
    step 200: loss 0.0050
    2 equal replicas, 1916816 bytes sent
"""

import torch
from torch import nn

import pycomm


def main() -> None:
    group = pycomm.init()
    torch.manual_seed(0)
    target = nn.Linear(32, 4)  # the function to learn, the same on every rank
    model = pycomm.DataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    own = torch.Generator().manual_seed(group.rank)  # each rank draws different batches

    for step in range(200):
        x = torch.randn(16, 32, generator=own)
        loss = nn.functional.mse_loss(model(x), target(x).detach())
        optimizer.zero_grad()
        loss.backward()  # also averages gradients over all ranks
        optimizer.step()
        if step % 50 == 49:
            mean = pycomm.all_reduce(loss.detach().clone(), op="avg")
            if group.rank == 0:
                print(f"step {step + 1}: loss {mean.item():.4f}")

    replicas = pycomm.all_gather(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert all(torch.equal(one, replicas[0]) for one in replicas)
    if group.rank == 0:
        print(f"{group.size} equal replicas, {group.stats().bytes} bytes sent")
    pycomm.shutdown()


if __name__ == "__main__":
    main()
