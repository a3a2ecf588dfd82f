"""The workloads of the convergence benchmark: small models on real data.

Text: the source of Python's own standard library; "larger text" has a model of 10 times as many
parameters, and 3 times as many steps. Images: Fashion-MNIST, as in Debian's package
dataset-fashion-mnist (apt-get install dataset-fashion-mnist).
"""

from __future__ import annotations

import functools
import gzip
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pycomm.bench.support import text
from pycomm.bench.support.model import CharGPT, Shape

IMAGES = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Workload:
    """A model, its data and its schedule. `batch` gives one rank's part of a step."""

    name: str
    steps: int
    rate: float
    weight_decay: float
    clip_norm: float | None
    higher_is_better: bool  # its score is an accuracy in per cent, else a loss
    model: Callable[[int], nn.Module]  # of a seed
    batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]  # of the ranks
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    score: Callable[[nn.Module], float]

    def rate_at(self, step: int, steps: int) -> float:
        """Half a cosine, down to zero."""
        return self.rate * 0.5 * (1 + math.cos(math.pi * step / steps))


@functools.cache
def _characters() -> tuple[Tensor, Tensor]:
    return text.load()


def _character_model(seed: int, width: int = 64, layers: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return CharGPT(Shape(alphabet=len(text.ALPHABET), width=width, layers=layers))


def _character_batch(ranks: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    return text.batch(_characters()[0], max(1, 1024 // 64 // ranks), 64, random)


def _character_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def _character_score(model: nn.Module) -> float:
    x, y = text.batch(_characters()[1], 512, 64, torch.Generator().manual_seed(0))
    return _character_loss(model, x, y).item()


def missing(name: str) -> str:
    """The missing requirement of a workload on this machine, or ""."""
    if name == "images" and not IMAGES.is_dir():
        return f"{IMAGES} is missing: apt-get install dataset-fashion-mnist"
    return ""


@functools.cache
def _images(part: str) -> tuple[Tensor, Tensor]:
    """Images [n, 1, 28, 28] with mean 0 and deviation 1, and labels [n]; "train" or "t10k"."""
    pixels, labels = (
        torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())[skip:]), dtype=torch.uint8)
        for path, skip in (
            (IMAGES / f"{part}-images-idx3-ubyte.gz", 16),
            (IMAGES / f"{part}-labels-idx1-ubyte.gz", 8),
        )
    )
    return (pixels.view(-1, 1, 28, 28).float() / 255 - 0.286) / 0.353, labels.long()


def _image_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def _image_batch(ranks: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    images, labels = _images("train")
    chosen = torch.randint(len(images), (max(1, 64 // ranks),), generator=random)
    return images[chosen], labels[chosen]


@torch.no_grad()
def _image_score(model: nn.Module) -> float:
    images, labels = _images("t10k")
    right: Tensor = model(images).argmax(1) == labels
    return 100.0 * right.double().mean().item()


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "images", 2000, 0.04, 5e-4, None, True,
            _image_model, _image_batch, lambda m, x, y: F.cross_entropy(m(x), y), _image_score,
        ),
        Workload(
            "text", 1000, 0.25, 0.0, 1.0, False,
            _character_model, _character_batch, _character_loss, _character_score,
        ),
        Workload(
            "larger text", 3000, 0.25, 0.0, 1.0, False,
            functools.partial(_character_model, width=176, layers=3),
            _character_batch, _character_loss, _character_score,
        ),
    )
}  # fmt: skip
