"""Deep gradient compression: after a sparsity warm-up one thousandth of each gradient is sent.

    torchrun --standalone --nproc-per-node 2 examples/dgc.py

Prints

    step 50: loss 0.2777, sparsity 0.9375, 50240 of 279616 bytes (gather)
    step 200: loss 0.1622, sparsity 0.999, 18000 of 279616 bytes (gather)
"""

import torch
from torch import nn

import pycomm


def main() -> None:
    group = pycomm.init()
    torch.manual_seed(0)
    target = nn.Linear(256, 16)  # the function to learn, the same on every rank
    module = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
    dgc = pycomm.DGC(optimizer, rampup_step=100, sparsity=[0.75, 0.9375, 0.984375, 0.999])
    model = pycomm.DataParallel(module, compression=dgc)
    own = torch.Generator().manual_seed(group.rank)

    for step in range(200):
        x = torch.randn(32, 256, generator=own)
        loss = nn.functional.mse_loss(model(x), target(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if group.rank == 0 and step % 50 == 49:
            stats = dgc.stats()
            print(
                f"step {stats['step']}: loss {loss.item():.4f}, sparsity {stats['level']}, "
                f"{stats['sent_bytes']} of {stats['dense_bytes']} bytes ({stats['exchange']})"
            )

    replicas = pycomm.all_gather(nn.utils.parameters_to_vector(module.parameters()).detach())
    assert all(torch.equal(one, replicas[0]) for one in replicas)
    pycomm.shutdown()


if __name__ == "__main__":
    main()
