"""Models trained with DGC, and what DGC remembers of their parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from small_models import equal
from torch import Tensor, nn

import pycomm
from pycomm.compress.dgc import compressor_of
from pycomm.compress.residual import OWNED
from pycomm.compress.sharded import Sharding

RATE = 0.05


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": RATE, "momentum": 0.9, **options})


def compressed(
    module: nn.Module,
    form: dict[str, Any] | None = None,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    **options: Any,
) -> tuple[nn.Module, torch.optim.SGD, pycomm.DGC]:
    """The module in DataParallel, its optimizer and DGC; all of it is compressed."""
    optimizer = sgd(module, nesterov=nesterov, weight_decay=weight_decay)
    dgc = pycomm.DGC(optimizer, **{"sparsity": [0.9], "min_count": 1, **options})
    return pycomm.DataParallel(module, compression=dgc, **(form or {})), optimizer, dgc


def memory_of(dgc: pycomm.DGC) -> dict[str, list[Tensor]]:
    state = compressor_of(dgc).state
    owned = {f"owner_residual {key}": [x.clone()] for key, x in state.save()[OWNED].items()}
    return {m.name: [x.clone() for x in m.tensors] for m in state.memories.values()} | owned


def state_of_rank(dgc: pycomm.DGC) -> Mapping[str, Any]:
    """The state of this rank as if it shared nothing with its host, with what it has as an owner in
    the residual."""
    state = compressor_of(dgc).state
    return state.of_rank(state.folded(dgc.state_dict()))


def same_memory(a: dict[str, list[Tensor]], b: dict[str, list[Tensor]]) -> bool:
    return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)


def residual_by_owner(dgc: pycomm.DGC, group: pycomm.Group) -> Tensor:
    """The owner residual of this rank, at its coordinates; of a DGC with one parameter."""
    (memory,) = compressor_of(dgc).state.memories.values()
    found = torch.zeros(memory.count, dtype=torch.float64)
    for residual in dgc.state_dict()["owner_residual"].values():
        places = residual.nonzero().flatten()
        where = Sharding([memory.count], group.size).whole(group.rank, places)
        found[where.long()] = residual[places].double()
    return found
