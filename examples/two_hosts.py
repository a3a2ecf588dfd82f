"""Training on two hosts: DataParallel sums inside each host, then between the hosts.

Run the same line on both, with the name of one of them and a free port there:

    pycomm launch --nnodes 2 --rdzv-endpoint host0:29400 --nproc 2 examples/two_hosts.py

Before, set PYCOMM_SECRET to the same value on both: it excludes other processes from the run. The
first rank of each host prints its transports, and rank 0 the rest:

    rank 0 by self, rank 1 by shm, rank 2 by tcp, rank 3 by tcp
    step 10: loss 1.9724
    step 20: loss 1.7048
    4 equal replicas on 2 hosts
"""

import torch
from torch import nn
from torch.nn import functional as F

import pycomm

STEPS = 20


def main() -> None:
    group = pycomm.init()
    if pycomm.local_rank() == 0:
        peers = enumerate(group.peer_info())
        print(", ".join(f"rank {rank} by {peer.transport}" for rank, peer in peers))
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the launcher chose the rank's GPU
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    model = pycomm.DataParallel(net, hierarchical=True)  # two lanes, the default between hosts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = torch.Generator().manual_seed(group.rank)
    mean = pycomm.metrics.Mean(every=10)
    for step in range(1, STEPS + 1):
        x = torch.randn(32, 64, generator=own).to(device)
        loss = F.cross_entropy(model(x), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean.update(loss, len(x))
        value = mean.compute()
        if step % 10 == 0:
            pycomm.print0(f"step {step}: loss {value:.4f}")
    replicas = pycomm.all_gather(nn.utils.parameters_to_vector(net.parameters()).detach())
    assert all(torch.equal(one, replicas[0]) for one in replicas)
    pycomm.print0(f"{group.size} equal replicas on {pycomm.host_count()} hosts")
    pycomm.shutdown()


if __name__ == "__main__":
    main()
