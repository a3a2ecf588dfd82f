"""LocalSGD: two processes average parameters every eighth step and send an eighth of the bytes.

    torchrun --standalone --nproc-per-node 2 examples/local_sgd.py

Prints

    k_steps=1: loss 0.0042, 2846432 bytes sent
    k_steps=8: loss 0.0044, 521840 bytes sent
"""

import torch
from torch import nn

import pycomm


def train(k_steps: int, group: pycomm.Group) -> tuple[float, int]:
    """The mean over all ranks of the last losses, and the bytes that this rank sent."""
    torch.manual_seed(0)
    target = nn.Linear(32, 4)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    local = pycomm.LocalSGD(model, optimizer, k_steps=k_steps, begin_step=20)
    own = torch.Generator().manual_seed(group.rank)
    before = group.stats().bytes
    recent = torch.zeros(())
    for _ in range(300):
        x = torch.randn(16, 32, generator=own)
        loss = nn.functional.mse_loss(model(x), target(x).detach())
        local.zero_grad()
        loss.backward()
        local.step()
        recent = 0.9 * recent + 0.1 * loss.detach()
    sent = group.stats().bytes - before
    return pycomm.all_reduce(recent, op="avg").item(), sent


def main() -> None:
    group = pycomm.init()
    for k_steps in (1, 8):
        loss, sent = train(k_steps, group)
        if group.rank == 0:
            print(f"k_steps={k_steps}: loss {loss:.4f}, {sent} bytes sent")
    pycomm.shutdown()


if __name__ == "__main__":
    main()
