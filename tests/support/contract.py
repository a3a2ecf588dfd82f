"""Every form of compressed training, in one shape, for the tests of what they promise."""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sign_compression import Sign
from torch import Tensor, nn

import pycomm
from pycomm.testing import run_ranks

Sgd = dict[str, Any]

DGC: dict[str, dict[str, Any]] = {
    "dgc": {},
    "dgc model": {"select": "model"},
    "dgc masked": {"exchange": "dense_masked"},
    "dgc 2bit": {"value_dtype": "2bit", "exchange": "gather"},
    "dgc 1bit model": {"value_dtype": "1bit", "exchange": "gather", "select": "model"},
    "dgc sharded": {"exchange": "sharded", "value_dtype": "2bit"},
    "dgc sharded model": {"exchange": "sharded", "select": "model"},
    "dgc fused": {"fused": True},
    "dgc fused sharded": {"fused": True, "exchange": "sharded", "select": "model"},
    "dgc small": {"min_count": 1 << 20},
    "dgc dense": {"rampup_begin_step": 1000},
    "dgc ramp": {"rampup_begin_step": 2, "sparsity": [0.5, 0.75, 0.9], "rampup_step": 4},
    "dgc unmasked": {"select": "model", "masking": False},
}
QUANTIZE = {"quantize": pycomm.Quantize(1, 1), "quantize 3, 8": pycomm.Quantize()}
LOCAL: dict[str, dict[str, Any]] = {
    "topk": {"compression": pycomm.TopK(density=0.2, group=4)},
    "topk all": {"compression": pycomm.TopK(density=1.0, group=4)},
    "topk sharded": {"compression": pycomm.TopK(density=0.2, group=4, exchange="sharded")},
    "topk every 2": {"compression": pycomm.TopK(density=0.2, group=4), "k_steps": 2},
    "local quantize": {"compression": pycomm.Quantize(1, 1)},
    "local sign": {"compression": Sign()},
}
PLAIN: dict[str, dict[str, Any]] = {
    "local": {},
    "local, begin": {"begin_step": 100},
    "local, torch": {"begin_step": 3, "rule": "torch"},
}
GRADIENTS = [*DGC, *QUANTIZE]  # compressed in the backward pass
COMPRESSED = [*GRADIENTS, *LOCAL]
HOSTS = {"dgc": {"exchange": "hierarchical"}, "quantize": {}, "topk": {}}  # also between hosts


COUNT = 192  # elements of data()


def data(rank: int, step: int) -> Tensor:
    """Numbers of one rank."""
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(100 * step + rank))


class Line(nn.Module):
    """The gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a * x).sum()


@dataclass
class Trained:
    """A module and what trains it.

    Attributes:
        module, model: of the user, and what is called.
        optimizer: of the user.
        stepper: whose step() and zero_grad() a program calls.
        holder: of the compression's state; None: none.
    """

    module: nn.Module
    model: Any
    optimizer: torch.optim.Optimizer
    stepper: Any
    holder: Any

    def step(self, loss: Callable[[Any], Tensor], to_none: bool = True) -> None:
        self.stepper.zero_grad(set_to_none=to_none)
        loss(self.model).backward()
        self.stepper.step()

    def saved(self) -> list[Any]:
        """A checkpoint of this rank, as read from a file."""
        holders, file = [self.module, self.optimizer, self.holder], io.BytesIO()
        torch.save([one.state_dict() for one in holders if one is not None], file)
        file.seek(0)
        return list(torch.load(file, weights_only=True))

    def load(self, saved: list[Any]) -> None:
        holders = [self.module, self.optimizer, self.holder]
        for one, state in zip([one for one in holders if one is not None], saved, strict=True):
            one.load_state_dict(copy.deepcopy(state))


def compression_of(
    form: str, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, **options: Any
) -> Any:
    """DGC or QuantizedGradients; None for another form."""
    if form in DGC:
        given = {"sparsity": [0.9], "min_count": 1, **DGC[form], **options}
        return pycomm.DGC(optimizer, scaler=scaler, **given)
    if form in QUANTIZE:
        named = module.named_parameters()
        return pycomm.QuantizedGradients(named, QUANTIZE[form], scaler=scaler)
    return None


def trained(
    form: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    unused: bool = True,
    **options: Any,
) -> Trained:
    """The module under this form; by default with an SGD whose steps are the gradients."""
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=1.0)
    if form in LOCAL or form in PLAIN:
        given = {**(LOCAL.get(form) or PLAIN.get(form, {})), **options}
        local = pycomm.LocalSGD(module, optimizer, **given)
        return Trained(module, module, optimizer, local, local)
    compression = compression_of(form, module, optimizer, scaler, **options)
    model = pycomm.DataParallel(module, compression=compression, find_unused_parameters=unused)
    return Trained(module, model, optimizer, optimizer, compression)


def unsent(form: str, module: Callable[[], nn.Module], gathered: Any) -> list[Tensor]:
    """What all ranks have not sent, as a part of the mean gradient, by parameter: the residual
    of one rank that loads the state of all."""

    def alone(group: pycomm.Group) -> list[Tensor]:
        made = trained(form, module())
        made.holder.load_state_dict(copy.deepcopy(gathered))
        state = made.holder.state_dict()
        found = state["v"] if form in DGC else state["residual"]
        shapes = dict(made.module.named_parameters())
        rows = found.items() if isinstance(found, dict) else zip(shapes, found, strict=True)
        known = {name: x / state.get("scale", 1.0) for name, x in rows}
        return [known.get(n, torch.zeros(p.numel())).view(p.shape) for n, p in shapes.items()]

    return run_ranks(1, alone)[0]
