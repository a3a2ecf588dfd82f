"""SOAP, an optimizer for the convergence benchmark.

Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, arXiv 2409.11321, algorithm 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SOAP"]

LARGEST_SIDE = 512
"""A longer side of a matrix is not rotated."""


class SOAP(torch.optim.Optimizer):
    """Adam in the eigenbases of Shampoo's two factors; vectors and others have plain Adam.

    Args:
        params: the parameters; those of two dimensions are rotated.
        betas: of the first and the second moment; the factors have the second one too.
        lr: the learning rate.
        eps: added to the root of the second moment.
        every: steps between two updates of the bases, each one power iteration and a QR
            decomposition.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        betas: tuple[float, float] = (0.95, 0.95),
        lr: float = 0.0,
        eps: float = 1e-8,
        every: int = 10,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "every": every})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # returns no loss
        """Changes the parameters by their gradients."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _step(parameter, self.state[parameter], group)


def _step(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    grad = parameter.grad
    assert grad is not None
    beta1, beta2 = group["betas"]
    if not state:
        state["step"] = 0
        state["first"], state["second"] = torch.zeros_like(grad), torch.zeros_like(grad)
        state["sides"] = [
            i for i, n in enumerate(grad.shape) if grad.ndim == 2 and n <= LARGEST_SIDE
        ]
        state["factors"] = [_square(grad, side) for side in state["sides"]]
        state["bases"] = [torch.linalg.eigh(factor)[1] for factor in state["factors"]]
    state["step"] += 1
    state["first"].lerp_(grad, 1 - beta1)
    turned = _turn(grad, state, into=True)
    state["second"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
    first = _turn(state["first"], state, into=True) / (1 - beta1 ** state["step"])
    second = state["second"] / (1 - beta2 ** state["step"])
    change = _turn(first / (second.sqrt() + group["eps"]), state, into=False)
    parameter.add_(change, alpha=-group["lr"])
    for side, factor in zip(state["sides"], state["factors"], strict=True):
        factor.lerp_(_square(grad, side), 1 - beta2)
    if state["step"] % group["every"] == 0:
        pairs = zip(state["factors"], state["bases"], strict=True)
        state["bases"] = [torch.linalg.qr(factor @ basis)[0] for factor, basis in pairs]


def _square(grad: Tensor, side: int) -> Tensor:
    """G G^T or G^T G: a factor of Shampoo."""
    return grad @ grad.T if side == 0 else grad.T @ grad


def _turn(x: Tensor, state: dict[str, Any], into: bool) -> Tensor:
    """Rotates a matrix into the eigenbases, or back."""
    for side, basis in zip(state["sides"], state["bases"], strict=True):
        turn = basis.T if into else basis
        x = turn @ x if side == 0 else x @ turn.T
    return x
