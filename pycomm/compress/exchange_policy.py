"""Plans each sparsity level: k, the exchange, and the dtype of encoded values.

"auto" takes the exchange with the fewest received bytes per rank (schedule.py), "auto_time" that
with the least time (cost_model.py). Rank 0 broadcasts its costs once for each level, so that all
ranks choose the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pycomm import collectives
from pycomm._training.communicators import CommunicatorPool
from pycomm.compress import cost_model
from pycomm.compress.hierarchical import hosts_of
from pycomm.compress.options import Options
from pycomm.compress.parameter_state import ParameterState
from pycomm.compress.schedule import (
    Load,
    code_at,
    inter_host_exchange,
    received_bytes,
    to_send,
)
from pycomm.errors import InvalidArgument
from pycomm.group import Group


@dataclass(frozen=True)
class LevelPlan:
    """The plan of one level.

    Attributes:
        exchange: "dense", "gather", "dense_masked", "sharded" or "hierarchical".
        k: number of sent elements, for each parameter or for all together.
        value_dtype: of compact packets; None: raw packets, or no packets.
        exchange_costs: bytes ("auto") or seconds ("auto_time") by exchange; {}: not estimated.
        between: with "hierarchical", the exchange between hosts: "gather" or "sharded".
    """

    exchange: str
    k: Mapping[ParameterState, int] | int
    value_dtype: str | None
    exchange_costs: Mapping[str, float]
    between: str = ""

    @property
    def is_sharded(self) -> bool:
        """Whether ranks or hosts own shards."""
        return "sharded" in (self.exchange, self.between)


DENSE = LevelPlan("dense", {}, None, {})


class Chooser:
    """Plans each level once.

    Attributes:
        exchanges: the exchange of each level, as rank 0 chose it.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._planned: dict[int, LevelPlan] = {}
        self._exchange_costs: dict[int, Mapping[str, float]] = {}
        self.exchanges: dict[int, str] = {}

    def forget(self, exchanges: Mapping[int, str] | None = None) -> None:
        """Drops all plans; a level that is not in `exchanges` chooses again."""
        self._planned.clear()
        self._exchange_costs.clear()
        self.exchanges = dict(exchanges or {})

    def planned(self, level: int) -> LevelPlan:
        """The result of plan() for this level; DENSE before the first call."""
        return self._planned.get(level, DENSE)

    def plan(
        self,
        level: int,
        memories: Sequence[ParameterState],
        pool: CommunicatorPool,
        may_be_dense: bool,
    ) -> LevelPlan:
        """The plan of a level. Collective at the first step of the level.

        Args:
            level: its index.
            memories: of all compressed parameters.
            pool: the communicators of the ranks.
            may_be_dense: no step was compressed yet, so there is no residual.

        Raises:
            InvalidArgument: select="model" with several settings of momentum or weight decay.
        """
        if not memories:
            return DENSE
        if level in self._planned:
            return self._planned[level]
        options = self._options
        counts = [memory.count for memory in memories]
        sparsity = options.warmup.sparsity[level]
        k: Mapping[ParameterState, int] | int
        if options.selects_model:
            if len(found := {memory.hyper for memory in memories}) > 1:
                raise InvalidArgument(
                    f'select="model": got {found}, expected one momentum, weight decay and '
                    "Nesterov in all groups of the optimizer"
                )
            counts = [sum(counts)]
            ks = [to_send(counts[0], sparsity, options.k_rule)]
            k = ks[0]
        else:
            ks = [to_send(count, sparsity, options.k_rule) for count in counts]
            k = dict(zip(memories, ks, strict=True))
        code = options.value_dtype if options.compact else None
        if code is not None and options.is_auto:
            code = code_at(code, 1 - sparsity)
        load = Load(ks, counts, memories[0].u.itemsize, code, options.owner_k_factor)
        exchange = self._choose(level, load, pool, may_be_dense, memories[0].u.device)
        compact = exchange in ("gather", "sharded", "hierarchical")
        inter_host = inter_host_exchange(load, _hosts(pool)) if exchange == "hierarchical" else ""
        costs = self._exchange_costs.get(level, {})
        plan = LevelPlan(exchange, k, code if compact else None, costs, inter_host)
        self._planned[level] = plan
        return plan

    def _choose(
        self,
        level: int,
        load: Load,
        pool: CommunicatorPool,
        may_be_dense: bool,
        device: torch.device,
    ) -> str:
        """The cheapest exchange by rank 0's costs; the first among equals."""
        options = self._options
        if level not in self.exchanges:
            if not options.is_auto:
                costs = dict.fromkeys([options.exchange], 0.0)
            elif options.exchange == "auto":
                costs = received_bytes(load, pool.size, _hosts(pool))
            else:
                costs = cost_model.measure_exchanges(load, pool, may_be_dense, device)
            costs = costs_of_rank_0(costs, pool.group)
            if options.is_auto:
                self._exchange_costs[level] = costs
            self.exchanges[level] = min(costs, key=lambda name: costs[name])
        return self.exchanges[level]


def costs_of_rank_0(costs: Mapping[str, float], group: Group) -> dict[str, float]:
    """Collective. Rank 0's costs, so that all ranks choose the same exchange."""
    shared = torch.tensor(list(costs.values()), dtype=torch.float64)
    collectives.broadcast(shared, 0, group=group)
    return dict(zip(costs, shared.tolist(), strict=True))


def _hosts(pool: CommunicatorPool) -> int:
    """The number of hosts."""
    return max(hosts_of(pool.group)) + 1
