"""The mean over ranks of an optimizer's state, for another number of ranks.

With compressed updates each rank has second moments of its own gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pycomm import collectives
from pycomm._training import coalesced
from pycomm._training.shards import as_shard, local_shard
from pycomm.group import Group


def mean_state(optimizer: torch.optim.Optimizer, group: Group) -> dict[str, Any]:
    """Collective. A copy of optimizer.state_dict() with the mean of all moments.

    Moments are the floating-point tensors with the shape of their parameter. Those of a sharded one
    are this rank's shards, and the group has the ranks with the same shard. A parameter keeps this
    rank's state if it has other tensors of several elements, such as the bases of SOAP, or if
    a rank has no state of it.
    """
    saved = optimizer.state_dict()
    state = {place: _copied(one) for place, one in saved["state"].items()}
    parameters = [p for one in optimizer.param_groups for p in one["params"]]
    keys = [_moments(state.get(i, {}), local_shard(p)) for i, p in enumerate(parameters)]
    counts = torch.tensor([[len(one), -len(one)] for one in keys])
    collectives.all_reduce(counts, "min", group=group)
    places = [
        (place, key)
        for place, (least, negated_most) in enumerate(counts.tolist())
        if least == -negated_most
        for key in keys[place]
    ]
    if places:
        own = [state[place][key] for place, key in places]
        for (place, key), mean in zip(places, coalesced.average(own, group), strict=True):
            state[place][key] = mean
    return {**saved, "state": state}


def load_mean_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads the result of mean_state() into an optimizer of the same parameters, or shards."""
    parameters = [p for one in optimizer.param_groups for p in one["params"]]
    moments = {}
    for place, one in state["state"].items():
        keys = _moments(one, local_shard(parameters[place]))
        moments[place] = one | {key: as_shard(one[key], parameters[place]) for key in keys}
    optimizer.load_state_dict({**state, "state": moments})


def _copied(state: Any) -> Any:
    """A copy of the state of a parameter, with shards as plain tensors."""
    if not isinstance(state, dict):
        return state
    return {key: local_shard(x).clone() if isinstance(x, Tensor) else x for key, x in state.items()}


def _moments(state: dict[str, Any], parameter: Tensor) -> list[str]:
    """The keys of the moments of a parameter, in a fixed order; none if the state has a tensor of
    another shape."""
    found = []
    for key, x in sorted(state.items()):
        if isinstance(x, Tensor) and x.shape == parameter.shape:
            found += [key] if x.is_floating_point() and x.dim() > 0 else []
        elif isinstance(x, list | tuple | dict) or (isinstance(x, Tensor) and x.numel() > 1):
            return []
    return found
