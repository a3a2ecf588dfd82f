"""Half precision with a static loss scale and DGC: all ranks skip a step with Inf.

    pycomm launch --nproc 2 examples/mixed_precision.py

Prints

    skipped: True
    loss 1.1208; equal: True
"""

import torch
from torch import nn
from torch.nn import functional as F

import pycomm

STEPS, OVERFLOW = 30, 10


def main() -> None:
    group = pycomm.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    scaler = pycomm.StaticLossScaler(scale=256.0)  # torch.amp.GradScaler adapts its scale instead
    dgc = pycomm.DGC(optimizer, rampup_begin_step=5, sparsity=[0.9], min_count=1024, scaler=scaler)
    model = pycomm.DataParallel(net, compression=dgc)
    own = torch.Generator().manual_seed(group.rank)
    for step in range(STEPS):
        x = torch.randn(16, 32, generator=own)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = model(x)
        loss = F.cross_entropy(scores.float(), x[:, :4].argmax(1))
        if step == OVERFLOW and group.rank == 1:
            loss = loss * float("inf")  # on one rank: all skip the step
        before = net[0].weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == OVERFLOW:
            pycomm.print0("skipped:", torch.equal(before, net[0].weight))
    replicas = pycomm.all_gather(net[0].weight.detach())
    pycomm.print0("loss", f"{loss.item():.4f};", "equal:", torch.equal(replicas[0], replicas[1]))
    pycomm.shutdown()


if __name__ == "__main__":
    main()
