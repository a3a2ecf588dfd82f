"""A model in two halves on two ranks, each with its own optimizer.

    python examples/model_parallel.py

Features are sent to rank 1, their gradients back to rank 0.
"""

import torch
from torch import nn
from torch.nn import functional as F

import pycomm


@pycomm.launcher(nproc=2, device="cpu")
def train() -> list[float]:
    """The losses, on rank 1."""
    rank = pycomm.rank()
    torch.manual_seed(rank)
    half = nn.Sequential(nn.Linear(16, 32), nn.Tanh()) if rank == 0 else nn.Linear(32, 4)
    optimizer = torch.optim.SGD(half.parameters(), lr=0.2)
    same = torch.Generator().manual_seed(0)  # rank 0 uses the inputs of a batch, rank 1 its labels
    losses = []
    for _ in range(60):
        x = torch.randn(32, 16, generator=same)
        optimizer.zero_grad()
        if rank == 0:
            pycomm.remote_send(half(x), dst=1).backward()  # waits for the gradient
        else:
            loss = F.cross_entropy(half(pycomm.remote_recv(src=0)), x[:, :4].argmax(1))
            loss.backward()  # sends the gradient
            losses.append(loss.item())
        optimizer.step()
    return losses


def main() -> None:
    _, losses = train()
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} steps")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
