"""Muon behind compressed gradients: the part of a LocalSGD step that concerns matrices.

    s = running RMS of g, one number for each matrix, of this rank
    e = e + lr * g / s             by LocalSGD: the local step moves the matrix by lr * g / s
    G = the mean of what the ranks sent
    torch.optim.Muon steps with the gradient G from the shared parameters, on all ranks alike

Muon's step does not depend on the scale of G, so lr decides only how matrices compete with other
parameters for selection.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pycomm import collectives
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import Group

DECAY = 0.99  # of the running mean square
KEY = "mean_squares"  # of a state: float64 [matrices, 2], see MuonMatrices


class MuonMatrices:
    """The matrices of a model that Muon steps.

    Args:
        muon: its parameters are the matrices.
        optimizer: of all other parameters.
        parameters: those of the model that ranks share.

    Attributes:
        optimizer: Muon.
        places: positions of the matrices in `parameters`.
        mean_squares: float64 [matrices, 2]: the running mean square of the gradient of this rank,
            from 0, and the sum of its weights, which corrects the bias of early steps.

    Raises:
        InvalidArgument: both optimizers have a parameter, or Muon one that is not in `parameters`.
        Unsupported: a parameter is not float32.
    """

    def __init__(
        self,
        muon: torch.optim.Optimizer,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.optimizer, self._parameters = muon, list(parameters)
        of_rest = {p for group in optimizer.param_groups for p in group["params"]}
        places = {p: place for place, p in enumerate(parameters)}
        given = [p for group in muon.param_groups for p in group["params"]]
        self._matrices = [p for p in given if p.requires_grad]  # frozen ones have no gradient
        for p in self._matrices:
            if p in of_rest or p not in places:
                raise InvalidArgument(
                    f"LocalSGD: a parameter of shape {tuple(p.shape)} of `muon` is "
                    f"{'in both optimizers' if p in of_rest else 'no parameter of the model'}: "
                    "give the matrices to Muon and all other parameters to the optimizer"
                )
        for p in parameters:
            if p.dtype != torch.float32:
                raise Unsupported(
                    f"LocalSGD(muon=): a parameter is {p.dtype}, expected float32: keep a float32 "
                    "copy of the parameters, for example with torch.autocast"
                )
        self.places = [places[p] for p in self._matrices]
        self.mean_squares = torch.zeros(len(self._matrices), 2, dtype=torch.float64)

    @property
    def settings(self) -> list[float]:
        """Numbers that must be equal on all ranks."""
        keys = ("lr", "weight_decay", "momentum")
        groups = self.optimizer.param_groups
        return [float(group.get(key, 0)) for group in groups for key in keys]

    @torch.no_grad()
    def local_step(self) -> None:
        """Moves each matrix by lr * g / s."""
        rows = dict(zip(self._matrices, self.mean_squares, strict=True))
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None or p not in rows:
                    continue
                row = rows[p]
                square = float(p.grad.double().square().mean())
                row.mul_(DECAY).add_(row.new_tensor([square, 1.0]), alpha=1 - DECAY)
                rms = float(row[0] / row[1]) ** 0.5
                if rms != 0:  # NaN must be seen
                    p.add_(p.grad, alpha=-float(group["lr"]) / rms)

    @torch.no_grad()
    def step(
        self, snapshot: Sequence[Tensor], means: Sequence[Tensor], unused: Collection[int]
    ) -> None:
        """The shared step: Muon's of the matrices, theta - mean of all others.

        Args:
            snapshot: the shared parameters theta.
            means: of the received updates.
            unused: places of the parameters that no rank used, which stay as they are.
        """
        gradients = [p.grad for p in self._matrices]
        for p, theta, mean in zip(self._parameters, snapshot, means, strict=True):
            p.data.copy_(theta)
            p.data.sub_(mean)
        for p, place in zip(self._matrices, self.places, strict=True):
            p.data.copy_(snapshot[place])
            p.grad = None if place in unused else means[place]
        try:
            self.optimizer.step()
        finally:
            for p, gradient in zip(self._matrices, gradients, strict=True):
                p.grad = gradient

    def save(self) -> dict[str, Any]:
        """The state of this rank."""
        return {KEY: self.mean_squares.clone(), "muon": self.optimizer.state_dict()}

    def gather(self, group: Group, dst: int) -> list[dict[str, Tensor]] | None:
        """Collective. The part of the state that differs by rank, of each rank, on `dst`."""
        rows = collectives.gather(self.mean_squares.clone(), dst, group=group)
        return None if rows is None else [{KEY: row.clone()} for row in rows]

    def load(self, sources: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the state by this rank's, or by the mean of all ranks.

        Raises:
            InvalidArgument: the state is of other matrices; nothing changes.
        """
        for source in sources:
            found = source.get(KEY)
            if found is None or found.shape != self.mean_squares.shape:
                raise InvalidArgument(
                    "LocalSGD: invalid state: got "
                    f"{0 if found is None else len(found)} matrices of Muon, expected "
                    f"{len(self.mean_squares)}"
                )
        self.optimizer.load_state_dict(sources[0]["muon"])
        self.mean_squares.copy_(torch.stack([source[KEY] for source in sources]).mean(0))
