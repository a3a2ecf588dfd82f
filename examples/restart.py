"""Training that loses a rank; torch's launcher restarts it from the last checkpoint.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/restart.py

Rank 1 is killed. The checkpoint holds the model, the optimizer and the residual of every rank
(DGC's u and v), so that the remaining steps equal those of an undisturbed run bit for bit. Prints

    continues from step 80
    the parameters equal those of an undisturbed run, bit for bit
"""

import os
import signal
from pathlib import Path

import torch
from torch import nn

import pycomm

CHECKPOINT = Path("restart.pt")
STEPS, EVERY = 120, 40


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(path: Path, dies_at: int | None = None) -> torch.Tensor:
    """Trains to the last step, from the checkpoint if there is one; returns the parameters."""
    rank = pycomm.rank()
    torch.manual_seed(0)
    target = nn.Linear(64, 8)  # the function to learn, the same on every rank
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    dgc = pycomm.DGC(optimizer, sparsity=[0.9])
    model = pycomm.DataParallel(module, compression=dgc)
    begin = 0
    if path.exists():
        saved = pycomm.load(path)
        begin = saved["step"]
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        dgc.load_state_dict(saved["dgc"])
        pycomm.print0(f"continues from step {begin}")
    for step in range(begin, STEPS):
        if step == dies_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x = data(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target(x).detach()).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            residual = dgc.gather_state()  # of all ranks, on rank 0
            state = {"step": step + 1, "model": module.state_dict(), "dgc": residual}
            pycomm.save({**state, "optimizer": optimizer.state_dict()}, path)
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def main() -> None:
    pycomm.init()
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    parameters = train(CHECKPOINT, dies_at=100 if first else None)
    undisturbed = train(Path("other.pt"))
    assert torch.equal(parameters, undisturbed)
    pycomm.print0("the parameters equal those of an undisturbed run, bit for bit")
    pycomm.shutdown()


if __name__ == "__main__":
    main()
