"""Small random trainings, for tests/ranks/test_combinations.py: what a seed draws.

A plan has a model with unusual parameters, one or two optimizers, a compression with its exchange,
and how the program uses them. combination_runs.py trains it, combination_checks.py judges it.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 8  # of a sample
ROWS = 13  # of the sparse embedding
BATCH = 4
GRADIENTS = ("dense", "quantize", "dgc")  # DataParallel averages or compresses gradients
LOCAL = ("local", "topk", "local quantize", "muon")  # of LocalSGD
KINDS = (*GRADIENTS, *LOCAL)
WEIGHTS = (3, 4, 8, 3, 4, 3, 2)
NEVER = 1 << 20  # a rampup_begin_step that no plan reaches

Options = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What one seed draws.

    Attributes:
        kind: one of KINDS.
        ranks, hosts: the ranks, and the simulated host of each; empty: one host.
        options: of the compression, and with LOCAL of LocalSGD.
        wrapper: of DataParallel.
        parts: unusual parameters of the model.
        width: of the hidden layer.
        dtype: of the parameters.
        optimizers: the options of one or two, with their `name`.
        scaler: "", "static" or "torch".
        clip: the limit of clip_grad_norm_, which the program calls; None: it does not.
        micro: backward passes for each step.
        epochs: by epoch and rank: its number of steps. They differ under join only.
        join: the epochs are under DataParallel.join.
        frozen_from: the step from which the part "late" is frozen.
        freeze_first: a resumed program freezes before it wraps the model.
        to_none: of zero_grad.
        overflows: by step: the rank and the parameter that has Inf.
        idle: steps in which no rank uses the part "branch".
        reproducible: of the group.
        ddp: torch's DistributedDataParallel with a hook, instead of DataParallel.
    """

    seed: int
    kind: str
    ranks: int
    hosts: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)
    wrapper: Options = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    width: int = 16
    dtype: torch.dtype = torch.float32
    optimizers: tuple[Options, ...] = ()
    scaler: str = ""
    clip: float | None = None
    micro: int = 1
    epochs: tuple[tuple[int, ...], ...] = ()
    join: bool = False
    frozen_from: int = 0
    freeze_first: bool = False
    to_none: bool = True
    overflows: dict[int, tuple[int, str]] = field(default_factory=dict)
    idle: frozenset[int] = frozenset()
    reproducible: bool = False
    ddp: bool = False

    @property
    def local(self) -> bool:
        """Whether LocalSGD trains."""
        return self.kind in LOCAL

    @property
    def bitwise(self) -> bool:
        """Whether no sum depends on the order of buckets, which a resumed run chooses anew."""
        return self.local or self.ranks == 2 or self.reproducible

    @property
    def learning_rate(self) -> float:
        """Of all optimizers."""
        return self.optimizers[0]["lr"]

    def uses_branch(self, rank: int, step: int, micro: int) -> bool:
        """Whether this pass uses the part "branch"."""
        if step in self.idle:
            return False
        return random.Random(f"{self.seed} {rank} {step} {micro}").random() < 0.6

    def steps_of(self, epoch: int) -> range:
        """The numbers of the steps of an epoch, of the rank with most of them."""
        first = sum(max(counts) for counts in self.epochs[:epoch])
        return range(first, first + max(self.epochs[epoch]))


class Model(nn.Module):
    """A perceptron, and the parts of the plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        parts, width = plan.parts, plan.width
        # The order of parameters is drawn too: "branch" may come first.
        if "branch first" in parts:
            self.branch = nn.Linear(FEATURES, FEATURES)
        self.a, self.b = nn.Linear(FEATURES, width), nn.Linear(width, FEATURES)
        if "scalar" in parts:
            self.scalar = nn.Parameter(torch.ones(()))
        if "empty" in parts:
            self.empty = nn.Parameter(torch.zeros(0, 3))
        if "tied" in parts:
            self.tied = nn.Linear(FEATURES, width)
            self.tied.weight = self.a.weight
        for name in ("frozen", "late"):
            if name in parts:
                setattr(self, name, nn.Linear(FEATURES, FEATURES))
        if "frozen" in parts:
            self.frozen.requires_grad_(False)
        if "branch" in parts:
            self.branch = nn.Linear(FEATURES, FEATURES)
        if "never" in parts:
            self.never = nn.Linear(3, 5)
        if "sparse" in parts:
            self.rows = nn.Embedding(ROWS, FEATURES, sparse=True)
        if "norm" in parts:
            self.norm = nn.BatchNorm1d(FEATURES)
        made = torch.Generator().manual_seed(plan.seed)
        for p in self.parameters():
            bound = min(0.4, max(1, p[0].numel() if p.dim() and len(p) else 1) ** -0.5)
            nn.init.uniform_(p, -bound, bound, generator=made)
        self.to(plan.dtype)

    def forward(self, x: Tensor, rows: Tensor, use_branch: bool) -> Tensor:
        hidden = self.a(x)
        if hasattr(self, "tied"):
            hidden = hidden + self.tied(x)
        y = self.b(torch.tanh(hidden))
        if hasattr(self, "scalar"):
            y = y * (1 + self.scalar)
        if hasattr(self, "empty"):
            y = y + self.empty.sum()
        for name in ("frozen", "late"):
            if hasattr(self, name):
                y = y + getattr(self, name)(x)
        if hasattr(self, "rows"):
            y = y + self.rows(rows)
        if hasattr(self, "norm"):
            y = self.norm(y)
        if hasattr(self, "branch") and use_branch:
            y = y + self.branch(torch.tanh(y))
        # Gradients are bounded, so that no plan diverges.
        return (torch.tanh(y) - torch.tanh(x.flip(1))).square().mean()


def inputs(plan: Plan, rank: int, step: int, micro: int) -> tuple[Tensor, Tensor, bool]:
    """Arguments of Model.forward."""
    made = torch.Generator().manual_seed(plan.seed + 1000 * step + 10 * micro + rank)
    x = torch.randn(BATCH, FEATURES, generator=made).to(plan.dtype)
    rows = torch.randint(0, ROWS, (BATCH,), generator=made)
    return x, rows, plan.uses_branch(rank, step, micro)


def plan_of(seed: int, *, ddp: bool = False) -> Plan:
    """The plan that a seed draws.

    Args:
        seed: any number.
        ddp: draw one for torch's DistributedDataParallel.
    """
    draw = random.Random(f"{seed} {ddp}")
    kind = draw.choice(("dgc", "quantize")) if ddp else draw.choices(KINDS, WEIGHTS)[0]
    plan = Plan(seed, kind, ranks=2 if ddp else draw.choice((2, 2, 3, 4)), ddp=ddp)
    change = dataclasses.replace
    if not ddp:
        plan = change(plan, hosts=_hosts(draw, plan.ranks))
    plan = change(plan, parts=_parts(draw, plan), width=draw.choice((3, 16, 16, 40, 1100)))
    plan = change(plan, dtype=_dtype(draw, kind), optimizers=_optimizers(draw, kind))
    if "sparse" in plan.parts and all(o["name"] == "adamw" for o in plan.optimizers):
        plan = change(plan, parts=tuple(part for part in plan.parts if part != "sparse"))
    plan = change(
        plan,
        scaler=draw.choice(("", "", "static", "torch")),
        micro=draw.choice((1, 1, 2, 3)),
        to_none=draw.random() < 0.8,
        reproducible=draw.random() < 0.5,
        freeze_first=draw.random() < 0.5,
        frozen_from=draw.randrange(1, 5),
        idle=frozenset(step for step in range(12) if draw.random() < 0.3),
        wrapper={} if plan.local or ddp else _wrapper(draw, plan),
    )
    plan = change(plan, options=_options(draw, plan))
    if kind in ("dense", "quantize") and draw.random() < 0.3:
        plan = change(plan, clip=draw.choice((0.05, 0.5)))
    join = not plan.local and not ddp and draw.random() < 0.25
    plan = change(plan, join=join, epochs=_epochs(draw, plan.ranks, join))
    if plan.scaler and not (kind == "dense" and plan.clip and len(plan.optimizers) == 2):
        # else Inf in the gradients of one optimizer clips those of the other to NaN
        steps = range(sum(max(counts) for counts in plan.epochs))
        names = ["a.weight", "b.weight", "b.bias", *(["rows.weight"] * ("sparse" in plan.parts))]
        found = {s: (draw.randrange(plan.ranks), draw.choice(names)) for s in steps}
        plan = change(plan, overflows={s: one for s, one in found.items() if draw.random() < 0.25})
    return plan


def _hosts(draw: random.Random, ranks: int) -> tuple[str, ...]:
    if ranks < 3 or draw.random() < 0.6:
        return ()
    return tuple("ab"[i * 2 // ranks] for i in range(ranks))


def _parts(draw: random.Random, plan: Plan) -> tuple[str, ...]:
    known = ["scalar", "empty", "tied", "frozen", "late", "never", "sparse"]
    parts = [part for part in known if draw.random() < 0.35]
    branch = draw.choice(("", "branch", "branch first"))
    norm = ["norm"] if draw.random() < 0.15 else []
    if plan.ddp or plan.kind == "muon":
        parts = [part for part in parts if part != "sparse"]
    return (*parts, *([branch] if branch else []), *norm)


def _dtype(draw: random.Random, kind: str) -> torch.dtype:
    others = {
        "dense": (torch.float64, torch.bfloat16),
        "dgc": (torch.float64,),
        "quantize": (torch.float64, torch.bfloat16),
        "topk": (torch.bfloat16,),
        "local quantize": (torch.bfloat16,),
        "local": (torch.float64,),
    }.get(kind, ())
    return draw.choice(others) if others and draw.random() < 0.2 else torch.float32


def _sgd(draw: random.Random) -> Options:
    momentum = draw.choice((0.0, 0.0, 0.5, 0.9))
    nesterov = bool(momentum) and draw.random() < 0.4
    return {"name": "sgd", "momentum": momentum, "nesterov": nesterov}


def _optimizers(draw: random.Random, kind: str) -> tuple[Options, ...]:
    """Learning rates are equal: a schedule of one would be one more way to differ."""
    # A large eps: Adam's steps are then continuous where a gradient is near 0.
    adamw = {"name": "adamw", "betas": (0.0, 0.99), "eps": 0.1}
    first = _sgd(draw) if kind == "dgc" or draw.random() < 0.5 else adamw
    two = kind in GRADIENTS and draw.random() < 0.4
    found = [first, *([draw.choice((_sgd(draw), adamw))] if two else [])]
    rate, decay = draw.choice((0.1, 0.02)), draw.choice((0.0, 0.0, 0.1))
    return tuple({**one, "lr": rate, "weight_decay": decay} for one in found)


def _wrapper(draw: random.Random, plan: Plan) -> Options:
    hierarchical = bool(plan.hosts) and draw.random() < 0.5
    return {
        "bucket_layers": draw.choice((None, 1, 2)),
        "lanes": draw.choice((None, 1, 2)),
        "hierarchical": hierarchical,
    }


def _epochs(draw: random.Random, ranks: int, join: bool) -> tuple[tuple[int, ...], ...]:
    if not join:
        return ((draw.randrange(3, 7),) * ranks,)
    return tuple(tuple(draw.randrange(4) for _ in range(ranks)) for _ in range(2))


def _options(draw: random.Random, plan: Plan) -> Options:
    if plan.kind == "dgc":
        return _dgc(draw, plan)
    if plan.kind == "quantize":
        return _quantize(draw, draw.choice(("auto", "sharded", "auto_time")))
    return _local(draw, plan) if plan.local else {}


def _quantize(draw: random.Random, exchange: str) -> Options:
    bits = (1, 2, 3, 4, 8)
    return {"bits": draw.choice(bits), "down_bits": draw.choice(bits), "exchange": exchange}


def _dgc(draw: random.Random, plan: Plan) -> Options:
    double = plan.dtype == torch.float64
    exchanges = ["auto", "gather", "dense_masked", "auto_time"]
    exchanges += ["sharded", "sharded"] if not double else []
    exchanges += ["hierarchical", "hierarchical"] if plan.hosts and not double else []
    exchange = draw.choice(exchanges)
    options = {
        "exchange": exchange,
        "sparsity": draw.choice(([0.9], [0.5, 0.9], [0.0, 0.97])),
        "rampup_begin_step": draw.choice((0, 0, 0, 1, 2, NEVER)),
        "rampup_step": draw.choice((1, 2, 4)),
        "clip_norm": draw.choice((None, None, 0.02, 0.5)),
        "clip": draw.choice(("parameter", "global")),
        "masking": draw.random() < 0.7,
        "select": draw.choice(("parameter", "model")),
        "min_count": draw.choice((0, 1, 9, 100)),
        "k_rule": draw.choice(("round", "paddle", "ceil")),
        "owner_k_factor": draw.choice((1, 3)),
        "fused": draw.random() < 0.25,
    }
    if not double and exchange not in ("dense_masked",) and draw.random() < 0.6:
        values = ("float32", "bfloat16", "3bit", "2bit", "1bit")
        options |= {"codec": "compact", "value_dtype": draw.choice(values)}
    if not options["fused"] and draw.random() < 0.2:
        names = ("momentum_correction", "decay_correction")
        options |= {name: draw.random() < 0.5 for name in names}
    return options


def _local(draw: random.Random, plan: Plan) -> Options:
    found: Options = {
        "k_steps": draw.choice((1, 1, 2, 3)),
        "begin_step": draw.choice((1, 1, 3)),
        "clip_norm": draw.choice((None, None, 0.05, 0.5)),
    }
    if plan.kind == "local":
        found["rule"] = draw.choice(("paddle", "torch"))
        if plan.optimizers[0]["name"] == "sgd":
            found["momentum"] = draw.choice(("local", "averaged"))
    elif plan.kind == "muon":
        found["k_steps"] = 1
    if plan.kind == "local quantize" or (plan.kind == "muon" and draw.random() < 0.3):
        found["compression"] = _quantize(draw, draw.choice(("auto", "sharded", "auto_time")))
    elif plan.kind in ("topk", "muon"):
        found["compression"] = {
            "density": draw.choice((0.05, 0.3, 1.0)),
            "group": draw.choice((1, 4, 16)),
            "value_dtype": draw.choice(("1bit", "2bit", "3bit", "bfloat16", "float32")),
            "exchange": draw.choice(("auto", "gather", "sharded")),
            "owner_k_factor": draw.choice((1, 4)),
        }
    if plan.kind != "muon" and draw.random() < 0.25:
        momentum = draw.choice((0.0, 0.5))
        found["outer"] = {"lr": draw.choice((0.5, 1.0)), "momentum": momentum}
    return found
