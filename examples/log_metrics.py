"""Logs the loss and the counters of group.stats() to TensorBoard or Weights & Biases, both offline.

    torchrun --standalone --nproc-per-node 2 examples/log_metrics.py [tensorboard | wandb]

Prints

    step 20: loss 0.0122, 25 calls, 932 bytes sent
    step 40: loss 0.0002, 45 calls, 1652 bytes sent
    logged to runs
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import pycomm


def logger(kind: str, folder: str) -> Callable[[int, dict[str, float]], object]:
    """log(step, numbers by name), for rank 0."""
    Path(folder).mkdir(exist_ok=True)
    if kind == "wandb":
        import wandb

        run = wandb.init(project="pycomm", mode="offline", dir=folder)
        return lambda step, numbers: run.log(numbers, step=step)
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    def log(step: int, numbers: dict[str, float]) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)
        writer.flush()

    return log


def main(kind: str) -> None:
    group = pycomm.init()
    torch.manual_seed(0)
    target = nn.Linear(8, 1)  # the function to learn, the same on every rank
    model = pycomm.DataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    log = logger(kind, "runs") if group.rank == 0 else None
    own = torch.Generator().manual_seed(group.rank)  # each rank draws different batches
    for step in range(1, 41):
        x = torch.randn(16, 8, generator=own)
        loss = nn.functional.mse_loss(model(x), target(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if log is not None and step % 20 == 0:
            stats = group.stats()  # a dictionary of numbers
            log(step, {"loss": loss.item(), **{f"pycomm/{name}": n for name, n in stats.items()}})
            print(f"step {step}: loss {loss:.4f}, {stats.calls} calls, {stats.bytes} bytes sent")
    if group.rank == 0:
        print("logged to runs")
    pycomm.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tensorboard")
