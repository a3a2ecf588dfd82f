"""Paddle's settings for training on GPUs, one after the other in one loop, with the rate of each.

    pycomm launch --nproc 2 examples/best_practices.py

Measure one setting at a time: which of them pays depends on the model and on the network. `lanes`
and `hierarchical` are for several hosts. Prints

    defaults                           N images/s, loss 2.3022
    bucket_mb=16                       N images/s, loss 2.3022
    bucket_layers=50                   N images/s, loss 2.3022
    lanes=2                            N images/s, loss 2.3022
    hierarchical=True                  N images/s, loss 2.3022
    all of them                        N images/s, loss 2.3022
    LocalSGD, k_steps=4 after step 8   N images/s, loss 2.3024
"""

import itertools
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import pycomm
from pycomm.data import InfiniteSampler, Prefetcher, ShardedSampler

BATCH, WARM_UP, STEPS = 32, 8, 24  # the rate is that of the steps after the warm-up
ON_GPU = torch.cuda.is_available()
DEVICE, HALF = ("cuda", torch.float16) if ON_GPU else ("cpu", torch.bfloat16)


class Images(torch.utils.data.Dataset):
    """Random images as bytes: the device converts them, so that fewer bytes are copied there."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        own = np.random.default_rng(i)
        return own.integers(0, 256, (3, 32, 32), np.uint8), int(own.integers(10))


def to_floats(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    x, y = batch
    return [x.float().div(255.0), y]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 10))


def train(name: str, settings: dict[str, object] | None) -> None:
    """The loop; without settings for DataParallel it averages parameters instead of gradients."""
    group, net = pycomm.init(), network().to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    if settings is None:
        model, optimizer = net, pycomm.LocalSGD(net, optimizer, k_steps=4, begin_step=WARM_UP)
    else:
        model = pycomm.DataParallel(net, **settings)
    scaler = pycomm.StaticLossScaler(128.0, DEVICE)
    sampler = InfiniteSampler(ShardedSampler(Images(), seed=1))  # the reader's queue never drains
    loader = torch.utils.data.DataLoader(Images(), BATCH, sampler=sampler, num_workers=1)
    batches = itertools.islice(Prefetcher(loader, DEVICE, depth=2, convert=to_floats), STEPS)
    mean = pycomm.metrics.Mean(every=8)  # fetches the loss at every eighth step
    begin = 0.0
    for step, (x, y) in enumerate(batches):
        if step == WARM_UP:
            begin = time.perf_counter()
        with torch.autocast(DEVICE, HALF):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        mean.update(loss, len(y))
        value = mean.compute()
    rate = (STEPS - WARM_UP) * BATCH * group.size / (time.perf_counter() - begin)
    pycomm.print0(f"{name:33} {rate:5.0f} images/s, loss {value:.4f}")


def main() -> None:
    pycomm.init()
    settings = {"bucket_mb": 16, "bucket_layers": 50, "lanes": 2, "hierarchical": True}
    train("defaults", {})
    for name, value in settings.items():
        train(f"{name}={value}", {name: value})
    train("all of them", settings)
    train(f"LocalSGD, k_steps=4 after step {WARM_UP}", None)
    pycomm.shutdown()


if __name__ == "__main__":
    main()
