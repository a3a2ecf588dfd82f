"""The models of the training benchmark, small enough for two cores.

They differ in the share of communication: large for the perceptron, small for the convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pycomm.bench.support.model import CharGPT, Shape


@dataclass(frozen=True)
class Task:
    """A model and its data."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    """Synthetic input and target of one step of one rank; the first dimension is samples."""


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut, [n, before, h, w] -> [n, after, h/s, w/s]."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 (He et al., arXiv 1512.03385, table 1) for images of 32 x 32: 11.2 M parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for after, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(before, after, stride), Residual(after, after, 1)]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The parameters of ResNet-50 for 1000 classes: 25,557,032 elements (He et al., 2016)."""
    shapes: list[tuple[int, ...]] = []

    def convolution(out: int, inner: int, size: int) -> None:
        shapes.extend([(out, inner, size, size), (out,), (out,)])  # and its normalization

    convolution(64, 3, 7)
    inner = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(width, inner, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, inner, 1)
            inner = 4 * width
    return [*shapes, (1000, inner), (1000,)]


class NextCharacter(CharGPT):
    """CharGPT with its scores as rows, [batch * time, alphabet], as the loss takes them."""

    def __init__(self) -> None:
        super().__init__(Shape(width=256))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).flatten(0, 1)


def perceptron() -> nn.Module:
    """Three layers of 1024: 3.2 M parameters."""
    return nn.Sequential(
        *(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()),
        nn.Linear(1024, 1024),
    )


TASKS = {
    task.name: task
    for task in (
        Task(
            "mlp",
            perceptron,
            lambda: (torch.randn(64, 1024), torch.randint(0, 1024, (64,))),
        ),
        Task(
            "gpt",
            NextCharacter,
            lambda: (torch.randint(0, 96, (8, 64)), torch.randint(0, 96, (8 * 64,))),
        ),
        Task(
            "resnet",
            resnet18,
            lambda: (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))),
        ),
    )
}
