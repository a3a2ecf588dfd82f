"""DGC's state, apart from the exchanges that rank 0 chose: that of residual.py, and

    {"version", "step", "switched", "exchange": {level: name}}    of each rank

The owner's part is of a parameter, or under the name "" of all compressed ones, in the order of v.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pycomm._arguments import Check, dict_of, flag, one_of, whole
from pycomm._training.arguments import flat_tensor
from pycomm.compress.parameter_state import ParameterState
from pycomm.compress.residual import OWNED, Residual, sources_of
from pycomm.compress.sharded import Sharding
from pycomm.group import Group

CHOSEN = ("dense", "gather", "dense_masked", "sharded", "hierarchical")  # exchanges of a level

OF_A_RANK: dict[str, Check] = {
    "step": whole,
    "switched": flag,
    "u": dict_of(flat_tensor),
    "v": dict_of(flat_tensor),
    "exchange": dict_of(functools.partial(one_of, allowed=CHOSEN)),
}


class DgcState(Residual):
    """u and v of all parameters, and the steps.

    Args:
        memories: the state of each parameter, in the order of the optimizer.
        together: k is for all compressed parameters together, not for each.
        may_own: a level may have owners.

    Attributes:
        memories: as given.
        step_count: committed steps.
        switched: u of compressed parameters follows DGC's formulas, not torch's.
    """

    def __init__(
        self, memories: Mapping[Tensor, ParameterState], together: bool, may_own: bool
    ) -> None:
        super().__init__("DGC", {}, _places)
        self.memories, self._together, self._may_own = memories, together, may_own
        self.step_count, self.switched = 0, False

    @property
    def compressed(self) -> list[ParameterState]:
        """The states of the compressed parameters."""
        return [memory for memory in self.memories.values() if memory.v is not None]

    @property
    def columns(self) -> Mapping[str, dict[str, Tensor]]:
        memories = self.memories.values()
        v = {memory.name: memory.v for memory in memories if memory.v is not None}
        return {"u": {memory.name: memory.u for memory in memories}, "v": v}

    def numbers(self, exchanges: Mapping[int, str]) -> dict[str, Any]:
        """What a state has beside tensors, with the exchange of each level."""
        return {
            "step": self.step_count,
            "switched": self.switched,
            "exchange": dict(exchanges),
        }

    def restore(self, saved: Mapping[str, Any], group: Group) -> dict[int, str]:
        """Restores a state; validates all of it before this one changes.

        Returns:
            The saved exchange of each level; {} at another number of ranks, on which the bytes of
            an exchange depend.
        """
        sources = sources_of(saved, group, "DGC", OF_A_RANK, {OWNED: dict_of(flat_tensor)})
        self.load(sources, group)
        first = sources[0]
        self.step_count, self.switched = int(first["step"]), bool(first["switched"])
        return dict(first["exchange"]) if first["size"] == group.size else {}

    def rename(self, before: Mapping[str, ParameterState]) -> None:
        """Takes over the present names of parameters, which had others `before`."""
        self._owned = {before[k].name if k in before else k: x for k, x in self._owned.items()}

    def parts(self) -> Mapping[str, Sequence[str]]:
        return {"": []} if self._together else {}

    def _fits(self, source: Mapping[str, Any]) -> bool:
        return self._may_own and super()._fits(source)


def _places(_: str, counts: Sequence[int], rank: int, size: int) -> Tensor:
    share = Sharding([sum(counts)], size)
    return share.whole(rank, torch.arange(sum(share.places)))
