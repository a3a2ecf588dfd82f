"""What a level takes: k, the exchange, and how values are coded.

"auto" takes the exchange of the fewest bytes that a rank receives (schedule.py), "auto_time" that
of the fewest seconds (cost_model.py). Rank 0 weighs, once for each level, and its numbers go to
all, so that ranks cannot choose differently. Called by dgc.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pycomm import collectives
from pycomm.communicators import CommunicatorPool
from pycomm.compress import cost_model
from pycomm.compress.hierarchical import hosts_of
from pycomm.compress.parameter_state import ParameterState
from pycomm.compress.schedule import Load, between, code_at, received_bytes, to_send
from pycomm.errors import InvalidArgument

__all__ = ["DENSE", "EXCHANGES", "Chooser", "Level"]

EXCHANGES = ("auto", "gather", "dense_masked", "sharded", "hierarchical", "auto_time")


@dataclass(frozen=True)
class Level:
    """What holds while a level lasts.

    Attributes:
        exchange: "dense", "gather", "dense_masked", "sharded" or "hierarchical".
        k: elements of each, or of all together.
        value_dtype: of compact packets; None: packets are raw, or there are none.
        exchange_costs: bytes ("auto") or seconds ("auto_time") by exchange; {}: not estimated.
        between: of "hierarchical": "gather" or "sharded", of hosts.
    """

    exchange: str
    k: Mapping[ParameterState, int] | int
    value_dtype: str | None
    exchange_costs: Mapping[str, float]
    between: str = ""


DENSE = Level("dense", {}, None, {})


class Chooser:
    """Plans levels, each once.

    Args:
        exchange: one of EXCHANGES.
        sparsity: by level.
        k_rule: as schedule.to_send has it.
        whole: k is of all together.
        value_dtype: of compact packets; None: packets are raw.
        owner_k_factor: what all owners together send on, in multiples of k.

    Attributes:
        chosen: the exchange by level, as rank 0 has said.
    """

    def __init__(
        self,
        exchange: str,
        sparsity: Sequence[float],
        k_rule: str,
        whole: bool,
        value_dtype: str | None,
        owner_k_factor: int,
    ) -> None:
        self._asked, self._sparsity, self._k_rule = exchange, sparsity, k_rule
        self._whole, self._value_dtype, self._owner_k_factor = whole, value_dtype, owner_k_factor
        self._planned: dict[int, Level] = {}
        self._exchange_costs: dict[int, Mapping[str, float]] = {}
        self.exchanges: dict[int, str] = {}

    def forget(self, exchanges: Mapping[int, str] | None = None) -> None:
        """Plans levels anew, with what was `chosen`: at another number of ranks nothing."""
        self._planned.clear()
        self._exchange_costs.clear()
        self.exchanges = dict(exchanges or {})

    def planned(self, level: int) -> Level:
        """What plan() has given; dense before it was asked."""
        return self._planned.get(level, DENSE)

    def plan(
        self,
        level: int,
        memories: Sequence[ParameterState],
        pool: CommunicatorPool,
        may_be_dense: bool,
    ) -> Level:
        """Collective at the first step of a level.

        Args:
            level: which one.
            memories: of all that is compressed.
            pool: whose ranks.
            may_be_dense: nothing was compressed yet, so that nothing is owed.
        """
        if not memories:
            return DENSE
        if level in self._planned:
            return self._planned[level]
        counts = [memory.count for memory in memories]
        sparsity = self._sparsity[level]
        k: Mapping[ParameterState, int] | int
        if self._whole:
            if len({memory.hyper for memory in memories}) > 1:
                raise InvalidArgument(
                    'select="model" needs one momentum, weight decay and Nesterov in all groups'
                )
            counts = [sum(counts)]
            ks = [to_send(counts[0], sparsity, self._k_rule)]
            k = ks[0]
        else:
            ks = [to_send(count, sparsity, self._k_rule) for count in counts]
            k = dict(zip(memories, ks, strict=True))
        code = self._value_dtype
        if code is not None and self._asked in ("auto", "auto_time"):
            code = code_at(code, 1 - sparsity)
        load = Load(ks, counts, memories[0].u.itemsize, code, self._owner_k_factor)
        exchange = self._choose(level, load, pool, may_be_dense)
        compact = exchange in ("gather", "sharded", "hierarchical")
        way = between(load, _hosts(pool)) if exchange == "hierarchical" else ""
        plan = Level(
            exchange, k, code if compact else None, self._exchange_costs.get(level, {}), way
        )
        self._planned[level] = plan
        return plan

    def _choose(self, level: int, load: Load, pool: CommunicatorPool, may_be_dense: bool) -> str:
        """Rank 0's choice, the first of the least weight."""
        if level not in self.exchanges:
            if self._asked not in ("auto", "auto_time"):
                weights = dict.fromkeys([self._asked], 0.0)
            elif self._asked == "auto":
                weights = received_bytes(load, pool.size, _hosts(pool))
            else:
                weights = cost_model.of_exchanges(load, pool, may_be_dense)
            said = torch.tensor(list(weights.values()), dtype=torch.float64)
            collectives.broadcast(said, 0, group=pool.group)
            weights = dict(zip(weights, said.tolist(), strict=True))
            if self._asked in ("auto", "auto_time"):
                self._exchange_costs[level] = weights
            self.exchanges[level] = min(weights, key=lambda name: weights[name])
        return self.exchanges[level]


def _hosts(pool: CommunicatorPool) -> int:
    """How many there are."""
    return max(hosts_of(pool.group)) + 1
