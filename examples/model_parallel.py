"""MegEngine's model in two halves on two ranks, each with its own optimizer.

    python examples/model_parallel.py

Rank 0 sends rank 1 the shape and dtype of the features, then the features. Rank 1 sends their
gradients. Prints

    features torch.float32 [32, 32], from cpu to cpu
    loss 1.4879 at first, 0.4561 after 60 steps
"""

import torch
from torch import nn
from torch.nn import functional as F

import pycomm


@pycomm.launcher(nproc=2)
def train() -> tuple[list[float], str, str]:
    """The losses and the features' form, on rank 1; the device."""
    rank = pycomm.rank()
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the launcher chose the rank's GPU
    torch.manual_seed(rank)
    half = nn.Sequential(nn.Linear(16, 32), nn.Tanh()) if rank == 0 else nn.Linear(32, 4)
    half.to(device)
    optimizer = torch.optim.SGD(half.parameters(), lr=0.2)
    same = torch.Generator().manual_seed(0)  # rank 0 uses the inputs of a batch, rank 1 its labels
    losses, form = [], ""
    for step in range(60):
        x = torch.randn(32, 16, generator=same)
        optimizer.zero_grad()
        if rank == 0:
            features = half(x.to(device))
            if step == 0:
                pycomm.user_set("shape", features.shape)
                pycomm.user_set("dtype", str(features.dtype).removeprefix("torch."))
            pycomm.remote_send(features, dest_rank=1).backward()  # waits for the gradient
        else:
            shape, dtype = pycomm.user_get("shape"), getattr(torch, pycomm.user_get("dtype"))
            form = f"{dtype} {list(shape)}"
            features = pycomm.remote_recv(src_rank=0, shape=shape, dtype=dtype)
            loss = F.cross_entropy(half(features.to(device)), x[:, :4].argmax(1).to(device))
            loss.backward()  # sends the gradient
            losses.append(loss.item())
        optimizer.step()
    return losses, form, device


def main() -> None:
    (_, _, lower), (losses, form, upper) = train()
    print(f"features {form}, from {lower} to {upper}")
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} steps")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
