"""Two processes of a decorated function: broadcast parameters, gradients averaged by a callback.

python examples/launcher.py
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import pycomm


@pycomm.launcher(nproc=2, device="cpu")
def train(data: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, float]:
    """The parameters and the last loss of this rank."""
    rank, size = pycomm.rank(), pycomm.size()
    torch.manual_seed(rank)  # different parameters on each rank, until the broadcast
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    pycomm.bcast_list_(net.parameters())
    average = pycomm.make_allreduce_cb("mean")
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sampler = pycomm.data.ShardedSampler(data, shuffle=False, order="contiguous")
    own = list(sampler)  # a contiguous block for each rank
    x, y = torch.from_numpy(data[own]), torch.from_numpy(labels[own])
    for step in range(20):
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()  # also averages gradients
        optimizer.step()
        if step % 10 == 9:
            pycomm.print0(f"step {step + 1} on {size} ranks: loss {loss.item():.4f} on rank {rank}")
    if rank == 0:
        pycomm.user_set("done", {"steps": 20})
    assert pycomm.user_get("done") == {"steps": 20}
    pycomm.barrier()
    return nn.utils.parameters_to_vector(net.parameters()).detach().numpy(), loss.item()


def main() -> None:
    made = np.random.default_rng(0)
    data = made.standard_normal((64, 16), dtype=np.float32)
    labels = data[:, :4].argmax(1)
    results = train(data, labels)  # by rank
    parameters = [own for own, _ in results]
    assert np.array_equal(parameters[0], parameters[1])
    print(f"{len(results)} equal replicas of {parameters[0].size} parameters")


if __name__ == "__main__":
    main()
