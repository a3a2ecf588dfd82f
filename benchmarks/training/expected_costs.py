"""Expected results of the convergence benchmark: bands of scores, limits, and an order.

The expected values are means and deviations over three seeds of an independent implementation of
the same methods, on the same data. Its transformer differs, so the compared quantity is a method's
cost: its loss against dense on the same batches. The band of n seeds is two deviations of the
difference of two such means to each side: 2 d sqrt(1/n + 1/3). A result better than its band is
reported and is not a failure.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SEEDS = 3
USUAL = {"images": 0.25, "text": 0.013}
"""Lower bounds of deviations, as three seeds are few: accuracy in points, nats."""


@dataclass(frozen=True)
class Band:
    """The cost of a method on a workload: its mean, and the deviation between seeds."""

    cost: float
    deviation: float

    def reach(self, seeds: int) -> float:
        """The largest allowed distance of a mean over `seeds` seeds from `cost`."""
        return 2 * self.deviation * math.sqrt(1 / seeds + 1 / SEEDS)


SCORES: dict[str, dict[str, tuple[float, ...]]] = {
    "images": {
        "dense": (88.44, 0.31),
        "dgc": (87.78, 0.14),
        "dgc without masking": (88.26, 0.17),
        "dgc without momentum correction": (87.92, 0.17),
        "dgc compact without masking": (88.29, 0.16),
        "dgc without ramp": (87.10, 0.33),
        "top-k without feedback": (79.10, 0.89),
        "local 2": (88.48,),
        "local 4": (88.18,),
        "local 8": (88.05,),
        "local 16": (87.40,),
    },
    "text": {
        "dense": (1.911, 0.008),
        "dgc": (2.084, 0.017),
        "dgc without masking": (2.120, 0.003),
        "dgc without momentum correction": (2.204, 0.018),
        "dgc without ramp": (2.448,),
        "top-k without feedback": (2.555,),
        "dgc 0.99": (1.910, 0.016),
        "dgc compact": (1.944, 0.011),
        "local 16": (2.242,),
    },
}
"""The expected costs by workload and method: the mean, and the deviation where it is known."""

WANTED = {
    (workload, name): Band(abs(score - rows["dense"][0]), max(USUAL[workload], *deviation, 0.0))
    for workload, rows in SCORES.items()
    for name, (score, *deviation) in rows.items()
    if name != "dense"
}

LIMITS = {
    "adamw topk 200": 0.035,
    "adamw topk 500": 0.10,
    "adamw quantize 3 8": 0.015,
    "adamw quantize 3 3": 0.035,
    "adamw quantized updates 1 1": 0.04,
    "muon topk 50": 0.05,
    "soap topk 200": 0.045,
    "soap topk 500": 0.115,
}
"""The largest mean cost on text over SEEDS seeds, in nats: against the same optimizer, dense."""

ORDERS = {
    "images": ["dense", "dgc without masking", "dgc", "dgc without ramp", "top-k without feedback"],
    "text": [
        "dense",
        "dgc",
        "dgc without masking",
        "dgc without momentum correction",
        "dgc without ramp",
        "top-k without feedback",
    ],
}
"""From the best to the worst; of two neighbours the worse may win by a band of equal means."""


def judged(workload: str, method: str, costs: Sequence[float]) -> str:
    """ "in", "better" or "worse" than its band, "" where there is none; a cost for each seed.

    A method with a limit is "in" or "worse" from SEEDS seeds on.
    """
    if workload == "text" and method in LIMITS and len(costs) >= SEEDS:
        return "in" if statistics.mean(costs) <= LIMITS[method] else "worse"
    band = WANTED.get((workload, method))
    if band is None or not costs:
        return ""
    more = statistics.mean(costs) - band.cost
    if abs(more) <= band.reach(len(costs)):
        return "in"
    return "worse" if more > 0 else "better"


def disordered(workload: str, costs: Mapping[str, Sequence[float]]) -> list[tuple[str, str]]:
    """Neighbours that violate the order; `costs` by method, one for each seed."""
    there = [name for name in ORDERS.get(workload, ()) if costs.get(name)]
    found = []
    for better, worse in itertools.pairwise(there):
        seeds = min(len(costs[worse]), len(costs[better]))
        gain = statistics.mean(costs[better]) - statistics.mean(costs[worse])
        if gain > WANTED[workload, worse].reach(seeds):
            found.append((better, worse))
    return found
