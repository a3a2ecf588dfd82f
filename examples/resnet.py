"""A small ResNet on random images, with dense or compressed gradients or averaged parameters.

    pycomm launch --nproc 2 examples/resnet.py [dense | dgc | localsgd | adaptive]

Changes from a single-process program: init, the training method, and pycomm's DataLoader.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pycomm

EPOCHS, BATCH, CLASSES = 2, 8, 10


class Block(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()
        )
        self.second = nn.Sequential(
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        )
        self.around = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.around(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        *(nn.BatchNorm2d(16), nn.ReLU(), Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)),
    )


def parallel(way: str, model: nn.Module) -> tuple[nn.Module, object]:
    """The module to call instead of the model, and the object to step instead of the optimizer."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    if way == "dense":
        return pycomm.DataParallel(model), sgd
    if way == "dgc":  # five levels over ten steps, after five dense ones
        levels = [0.75, 0.9375, 0.984375, 0.996, 0.999]
        dgc = pycomm.DGC(sgd, rampup_begin_step=5, rampup_step=10, sparsity=levels, min_count=4096)
        return pycomm.DataParallel(model, compression=dgc), sgd
    if way == "localsgd":
        return model, pycomm.LocalSGD(model, sgd, k_steps=4, begin_step=5)
    return model, pycomm.AdaptiveLocalSGD(model, sgd, init_k_steps=2, begin_step=5)


def main() -> None:
    way = sys.argv[1] if len(sys.argv) > 1 else "dense"
    group = pycomm.init()
    torch.manual_seed(0)  # the same images on all ranks; each reads its shard
    images = torch.utils.data.TensorDataset(
        torch.randn(160, 3, 16, 16), torch.randint(0, CLASSES, (160,))
    )
    loader = pycomm.data.DataLoader(images, batch_size=BATCH, shuffle=True, drop_last=True)
    model, optimizer = parallel(way, resnet())
    for epoch in range(EPOCHS):
        for batch, (x, y) in enumerate(loader):
            scores = model(x)
            loss = F.cross_entropy(scores, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(loss) if way == "adaptive" else optimizer.step()
            if batch % 5 == 0:
                mean, accuracy = pycomm.metrics.Mean(), pycomm.metrics.Accuracy()
                mean.update(loss, len(y))
                accuracy.update(scores, y)
                value, (acc1, acc5) = mean.compute(), accuracy.compute()
                pycomm.print0(
                    f"[Epoch {epoch}, batch {batch}] "
                    f"loss: {value:.5f}, acc1: {acc1:.5f}, acc5: {acc5:.5f}"
                )
    pycomm.print0(f"{way}: {group.stats().bytes} bytes sent by rank 0")
    pycomm.shutdown()


if __name__ == "__main__":
    main()
