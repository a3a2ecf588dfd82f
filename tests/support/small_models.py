"""Small models and batches for the tests of the training layer."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def seeded(model: nn.Module, seed: int) -> nn.Module:
    """The model with new random parameters. Does not use torch's generator, which threads share."""
    made = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        bound = max(1, parameter[0].numel() if parameter.dim() else 1) ** -0.5
        nn.init.uniform_(parameter, -bound, bound, generator=made)
    return model


def perceptron(seed: int = 1) -> nn.Module:
    """16 -> 33 -> 20 -> 3, three layers."""
    layers = nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 20), nn.Tanh(), nn.Linear(20, 3)
    return seeded(nn.Sequential(*layers), seed)


def replicas(ranks: int, make: Callable[[], nn.Module] = perceptron) -> list[nn.Module]:
    """A model for each rank; the parameters of other ranks differ from rank 0's."""
    models = [make() for _ in range(ranks)]
    for rank, model in enumerate(models):
        for parameter in model.parameters():
            parameter.data.add_(rank)
    return models


def batch(rank: int, step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 16, generator=made), torch.randn(rows, 3, generator=made)


def whole_batch(ranks: int, step: int) -> tuple[Tensor, Tensor]:
    """The batches of all ranks, concatenated."""
    x, y = zip(*(batch(rank, step) for rank in range(ranks)), strict=True)
    return torch.cat(x), torch.cat(y)


def step_on(
    model: nn.Module, data: tuple[Tensor, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(data[0]), data[1]).backward()
    optimizer.step()


def momentum_sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def alone(
    model: nn.Module,
    steps: int,
    ranks: int,
    make: Callable[[nn.Module], torch.optim.Optimizer] = momentum_sgd,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """The parameters after one process trained on the batches of all ranks."""
    optimizer = make(model)
    for step in range(steps):
        x, y = whole_batch(ranks, step)
        step_on(model, (x.to(dtype), y.to(dtype)), optimizer)
    return parameters(model)


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Bitwise equality, except for the sign of zero."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


COUNT = 512  # elements of each rank's own part of a Plane


class Plane(torch.nn.Module):
    """A plane whose gradient is the input, the rank's own data."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(ranks, COUNT))

    def forward(self, slope: torch.Tensor) -> torch.Tensor:
        return (self.w * slope).sum()


def slope_of(rank: int, ranks: int) -> torch.Tensor:
    """Rank r's gradient: 0 outside row r, so that the rows of sent values tell their sender."""
    slope = torch.zeros(ranks, COUNT)
    slope[rank] = torch.linspace(1, 2, COUNT) * (rank + 1)
    return slope
