"""What a level takes: k, the exchange, and how values are coded.

"auto" takes the exchange of the fewest bytes that a rank receives (schedule.py), "tuned" that of
the fewest seconds (cost_model.py). Rank 0 weighs, once for each level, and its numbers go to all, so
that ranks cannot choose differently. Called by dgc.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pycomm import collectives
from pycomm.communicators import Lanes
from pycomm.compress import cost_model
from pycomm.compress.hierarchical import hosts_of
from pycomm.compress.parameter_state import Memory
from pycomm.compress.schedule import Load, between, code_at, received_bytes, to_send
from pycomm.errors import InvalidArgument

__all__ = ["DENSE", "EXCHANGES", "Chooser", "Level"]

EXCHANGES = ("auto", "gather", "masked", "split", "two_level", "tuned")


@dataclass(frozen=True)
class Level:
    """What holds while a level lasts.

    Attributes:
        exchange: "dense", "gather", "masked", "split" or "two_level".
        k: elements of each, or of all together.
        value_dtype: of lean packets; None: packets are raw, or there are none.
        weighed: bytes ("auto") or seconds ("tuned") by exchange; {}: nobody has weighed.
        between: of "two_level": "gather" or "split", of hosts.
    """

    exchange: str
    k: Mapping[Memory, int] | int
    value_dtype: str | None
    weighed: Mapping[str, float]
    between: str = ""


DENSE = Level("dense", {}, None, {})


class Chooser:
    """Plans levels, each once.

    Args:
        exchange: one of EXCHANGES.
        sparsity: by level.
        k_rule: as schedule.to_send has it.
        whole: k is of all together.
        value_dtype: of lean packets; None: packets are raw.
        send_on: what all owners together send on, in multiples of k.

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
        send_on: int,
    ) -> None:
        self._asked, self._sparsity, self._k_rule = exchange, sparsity, k_rule
        self._whole, self._value_dtype, self._send_on = whole, value_dtype, send_on
        self._planned: dict[int, Level] = {}
        self._weighed: dict[int, Mapping[str, float]] = {}
        self.chosen: dict[int, str] = {}

    def forget(self, chosen: Mapping[int, str] | None = None) -> None:
        """Plans levels anew, with what was `chosen`: at another number of ranks nothing."""
        self._planned.clear()
        self._weighed.clear()
        self.chosen = dict(chosen or {})

    def planned(self, level: int) -> Level:
        """What plan() has given; dense before it was asked."""
        return self._planned.get(level, DENSE)

    def plan(
        self, level: int, memories: Sequence[Memory], lanes: Lanes, may_be_dense: bool
    ) -> Level:
        """Collective at the first step of a level.

        Args:
            level: which one.
            memories: of all that is compressed.
            lanes: whose ranks.
            may_be_dense: nothing was compressed yet, so that nothing is owed.
        """
        if not memories:
            return DENSE
        if level in self._planned:
            return self._planned[level]
        counts = [memory.count for memory in memories]
        sparsity = self._sparsity[level]
        k: Mapping[Memory, int] | int
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
        if code is not None and self._asked in ("auto", "tuned"):
            code = code_at(code, 1 - sparsity)
        load = Load(ks, counts, memories[0].u.itemsize, code, self._send_on)
        exchange = self._choose(level, load, lanes, may_be_dense)
        lean = exchange in ("gather", "split", "two_level")
        way = between(load, _hosts(lanes)) if exchange == "two_level" else ""
        plan = Level(exchange, k, code if lean else None, self._weighed.get(level, {}), way)
        self._planned[level] = plan
        return plan

    def _choose(self, level: int, load: Load, lanes: Lanes, may_be_dense: bool) -> str:
        """Rank 0's choice, the first of the least weight."""
        if level not in self.chosen:
            if self._asked not in ("auto", "tuned"):
                weights = dict.fromkeys([self._asked], 0.0)
            elif self._asked == "auto":
                weights = received_bytes(load, lanes.size, _hosts(lanes))
            else:
                weights = cost_model.of_exchanges(load, lanes, may_be_dense)
            said = torch.tensor(list(weights.values()), dtype=torch.float64)
            collectives.broadcast(said, 0, group=lanes.group)
            weights = dict(zip(weights, said.tolist(), strict=True))
            if self._asked in ("auto", "tuned"):
                self._weighed[level] = weights
            self.chosen[level] = min(weights, key=lambda name: weights[name])
        return self.chosen[level]


def _hosts(lanes: Lanes) -> int:
    """How many there are."""
    return max(hosts_of(lanes.group)) + 1
