"""Training that loses a rank and continues with the surviving ranks and their residuals.

    python examples/survivors.py

It starts its three ranks itself, as torchrun ends all ranks when one fails. Rank 1 is killed.
Prints

    rank 1 was lost in step 100: 2 ranks continue; lost residual norm about 0.536
    step 200: loss 0.0293, equal parameters on all ranks
"""

import multiprocessing
import os
import signal

import torch
from torch import nn

import pycomm
from pycomm.errors import GroupBroken, PeerLost

RANKS, STEPS = 3, 200


def train(rank: int, port: int) -> None:
    os.environ.update(PYCOMM_RANK=str(rank), PYCOMM_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    pycomm.init()
    torch.manual_seed(0)
    target = nn.Linear(64, 8)  # the function to learn, the same on every rank
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    dgc = pycomm.DGC(optimizer, sparsity=[0.9])
    model = pycomm.DataParallel(module, compression=dgc)
    own = torch.Generator().manual_seed(rank)

    step = 0
    while step < STEPS:
        if rank == 1 and step == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(32, 64, generator=own)
        try:
            loss = nn.functional.mse_loss(model(x), target(x).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        except (PeerLost, GroupBroken):  # rank 1 died
            result = model.shrink(optimizer)
            step = result.step
            pycomm.print0(
                f"rank {result.lost[0]} was lost in step {step}: {result.group.size} ranks "
                f"continue; lost residual norm about {result.lost_residual_norm:.3f}"
            )
    replicas = pycomm.all_gather(nn.utils.parameters_to_vector(module.parameters()).detach())
    assert all(torch.equal(one, replicas[0]) for one in replicas)
    pycomm.print0(f"step {step}: loss {loss.item():.4f}, equal parameters on all ranks")
    pycomm.shutdown()


def main() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = multiprocessing.get_context("spawn").Process
    processes = [start(target=train, args=(rank, store.port)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0]


if __name__ == "__main__":
    main()
