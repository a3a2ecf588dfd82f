"""ResNet-50 on random images: Paddle's program for two GPUs, which also runs on the CPU.

    pycomm launch --nproc 2 examples/resnet.py [dense | dgc | localsgd | adaptive] [--small]

`--small`: a quarter of the channels, 32 x 32 pixels. Prints rank 0's batches, and all ranks' rate:

    [Epoch 0, batch 0] loss: 4.68861, acc1: 0.00000, acc5: 0.00000
    epoch 0: N images/s on 2 x cpu
"""

import sys
import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pycomm
from pycomm.data import DataLoader, Prefetcher
from pycomm.metrics import accuracy

SMALL = "--small" in sys.argv
EPOCHS, BATCHES, BATCH, PIXELS, WIDTH = (2, 8, 8, 32, 16) if SMALL else (10, 100, 32, 224, 64)
CLASSES, WORKERS = 102, 1 if SMALL else 2


class RandomDataset(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return BATCHES * BATCH * pycomm.size()

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        own = np.random.default_rng(i)  # the same image in every rank and worker
        return own.random((3, PIXELS, PIXELS), np.float32), own.integers(0, CLASSES, 1)


def conv(before: int, after: int, size: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after))


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        inner = conv(before, width, 1), nn.ReLU(), conv(width, width, 3, stride)
        self.body = nn.Sequential(*inner, nn.ReLU(), conv(width, 4 * width, 1))
        self.skip = nn.Identity() if before == 4 * width else conv(before, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet50(classes: int, width: int = 64) -> nn.Module:
    layers, before = [conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(before, width << stage, 2 if stage and not block else 1))
            before = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def parallel(way: str, net: nn.Module) -> tuple[nn.Module, object]:
    """The module to call instead of the net, and the object to step instead of the optimizer."""
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    if way == "dgc":  # three levels of sparsity over nine steps, after five dense ones
        dgc = pycomm.DGC(sgd, rampup_begin_step=5, rampup_step=9, sparsity=[0.984375, 0.996, 0.999])
        return pycomm.DataParallel(net, compression=dgc), sgd
    if way == "localsgd":
        return net, pycomm.LocalSGD(net, sgd, k_steps=4, begin_step=5)
    if way == "adaptive":
        return net, pycomm.AdaptiveLocalSGD(net, sgd, init_k_steps=2, begin_step=5)
    return pycomm.DataParallel(net), sgd


def main() -> None:
    way = sys.argv[1] if len(sys.argv) > 1 else "dense"
    group = pycomm.init()
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the launcher chose the rank's GPU
    loader = DataLoader(RandomDataset(), BATCH, shuffle=True, drop_last=True, num_workers=WORKERS)
    model, optimizer = parallel(way, resnet50(CLASSES, WIDTH).to(device))
    for epoch in range(EPOCHS):
        begin = time.perf_counter()
        for batch, (x, y) in enumerate(Prefetcher(loader, device)):
            scores = model(x)
            loss = F.cross_entropy(scores, y[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(loss) if way == "adaptive" else optimizer.step()
            if batch % 5 == 0:
                numbers = loss.detach(), accuracy(scores, y, k=1), accuracy(scores, y, k=5)
                text = "[Epoch %d, batch %d] loss: %.5f, acc1: %.5f, acc5: %.5f"
                pycomm.print0(text % (epoch, batch, *numbers))
        rate = len(loader) * BATCH * group.size / (time.perf_counter() - begin)
        pycomm.print0(f"epoch {epoch}: {rate:.1f} images/s on {group.size} x {device}")
    pycomm.shutdown()


if __name__ == "__main__":
    main()
