"""Invariants of the trainings of combinations.py.

Sums are those of one step:

    kept + gain = sent + kept afterwards      as parts of the mean gradient, or of the mean update

`gain` is what the ranks' gradients add, by the formulas of docs/compression.md; `sent` is read from
the gradients or the parameters; `kept` is what a single rank has that loads all states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from combination_reference import close, compare_with_one_process, follows_one_process
from combination_runs import Record, Tensors, kept_of
from combination_runs import split as split_names
from combinations import Plan
from torch import Tensor

from pycomm.testing import run_ranks

PACKETS = ("gather", "sharded", "hierarchical")


@dataclass
class Step:
    """One step of all ranks.

    Attributes:
        ranks: the records of the ranks that had data.
        kept, kept_after: what all ranks have not sent before and after.
        window: the steps since the parameters were last equal, this one included.
    """

    plan: Plan
    number: int
    ranks: list[Record]
    kept: Tensors = field(default_factory=dict)
    kept_after: Tensors | None = None
    window: list[list[Record]] = field(default_factory=list)

    @property
    def names(self) -> Collection[str]:
        return self.ranks[0].before.keys()

    @property
    def overflows(self) -> bool:
        """Whether a rank with data has Inf."""
        found = self.plan.overflows.get(self.number)
        return found is not None and found[0] in self.active

    @property
    def active(self) -> list[int]:
        """The ranks that had data."""
        return [rank for rank, counts in enumerate(self._counts()) if counts]

    def _counts(self) -> list[bool]:
        for epoch, counts in enumerate(self.plan.epochs):
            steps = self.plan.steps_of(epoch)
            if self.number in steps:
                return [self.number - steps.start < count for count in counts]
        raise AssertionError(self.number)

    def used(self, name: str) -> list[Record]:
        """The ranks with a gradient, also one of zeros that zero_grad left; torch's DDP does not
        count these."""
        ddp = self.plan.ddp
        return [one for one in self.ranks if name in (one.own if ddp else one.present)]

    def mean(self, name: str) -> Tensor:
        """The mean gradient."""
        like = self.ranks[0].before[name]
        found = [one.own[name].double() for one in self.ranks if name in one.own]
        return sum(found, torch.zeros_like(like, dtype=torch.float64)) / self.plan.ranks


def check(plan: Plan, records: list[list[Record]]) -> None:
    """Raises AssertionError unless all invariants hold.

    Args:
        plan: what was trained.
        records: of each rank.
    """
    steps = steps_of(plan, records)
    for step in steps:
        check_equal(step)
        check_unused(step)
        check_verdict(step)
    if plan.join:
        check_sum_of_all(plan, records, steps)
    else:
        for step in steps:
            check_sum(step)
            if plan.local:
                check_clipping(step)
    for ends in zip(*(ends_of(one) for one in records), strict=True):
        for other in ends[1:]:
            equal(other.after, ends[0].after, "the ranks after join")
    if follows_one_process(plan):
        compare_with_one_process(plan, records)


def ends_of(records: list[Record]) -> list[Record]:
    """What train() recorded at the end of each join."""
    return [record for record in records if record.step < 0]


def steps_of(plan: Plan, records: list[list[Record]]) -> list[Step]:
    by_step: dict[int, list[Record]] = {}
    for record in (record for rank in records for record in rank if record.step >= 0):
        by_step.setdefault(record.step, []).append(record)
    states = [gathered_of(found) for _, found in sorted(by_step.items())]
    kept: Sequence[Tensors] = [{}] * len(states)
    if any(state is not None for state in states) and not plan.join:
        kept = run_ranks(1, kept_of, dataclasses.replace(plan, ddp=False), states)[0]
    found = []
    before: Tensors = {}
    window: list[list[Record]] = []
    for (number, ranks), after in zip(sorted(by_step.items()), kept, strict=True):
        window = [*window, ranks]
        found.append(Step(plan, number, ranks, before, after, window))
        before = after
        if not plan.local or ranks[0].synced:
            window = []
    return found


def gathered_of(ranks: Iterable[Record]) -> Any:
    return next((one.gathered for one in ranks if one.gathered is not None), None)


def equal(got: Tensors, wanted: Tensors, what: str) -> None:
    for name, x in wanted.items():
        same = torch.equal(got[name], x) or (
            (got[name].isnan() == x.isnan()).all()
            and (torch.equal(got[name].nan_to_num(), x.nan_to_num()))
        )
        assert same, f"{what}: {name} differs: {got[name]} != {x}"


def check_equal(step: Step) -> None:
    """The replicas are equal after each synchronisation."""
    first = step.ranks[0]
    assert len({one.synced for one in step.ranks}) == 1
    if step.plan.local and not first.synced:
        return
    for other in step.ranks[1:]:
        equal(other.after, first.after, f"the ranks after step {step.number}")
        assert step.plan.local or other.scale == first.scale, "the loss scales differ"


def check_unused(step: Step) -> None:
    """A parameter without a gradient does not move."""
    taken = [r for r in step.window if r is step.ranks or not skips_together(step.plan, r)]
    for name in step.names:
        used = any(name in one.present for ranks in taken for one in ranks)
        for start, end in zip(step.window[0], step.ranks, strict=False):
            if not used and step.active == list(range(step.plan.ranks)):
                same = torch.equal(start.before[name], end.after[name])
                assert same, f"step {step.number}: {name} has no gradient, and moved"


def skips_together(plan: Plan, ranks: list[Record]) -> bool:
    """Whether all ranks skipped this step of LocalSGD."""
    return plan.local and not any(any(one.stepped) for one in ranks)


def check_verdict(step: Step) -> None:
    """All ranks skip alike."""
    plan = step.plan
    stepped = [one.stepped for one in step.ranks]
    if not step.overflows:
        lists = split_names(plan, dict.fromkeys(step.names))
        filled = [i for i, names in enumerate(lists) if any(step.used(n) for n in names)]
        found = [one if plan.local else [one[i] for i in filled] for one in stepped]
        assert all(all(one) for one in found), f"step {step.number} was skipped: {stepped}"
        return
    rank, wrong = plan.overflows[step.number]
    if plan.kind in ("dgc", "quantize"):
        for place, names in enumerate(split_names(plan, dict.fromkeys(step.names))):
            if any(step.used(n) and step.ranks[0].before[n].numel() for n in names):
                found = [one[place] for one in stepped]  # an optimizer without values may step
                assert not any(found), f"step {step.number}, optimizer {place}: {found}"
    elif plan.kind == "dense":
        owner = [wrong in names for names in split_names(plan, dict.fromkeys(step.names))]
        wanted = [not one for one in owner]
        assert all(one == wanted for one in stepped), f"step {step.number}: {stepped}"
    elif together(step):
        assert not any(any(one) for one in stepped), f"step {step.number}: {stepped}"
    else:
        wanted = [[place != rank] for place in range(plan.ranks)]
        assert stepped == wanted, f"step {step.number}: {stepped}"


def together(step: Step) -> bool:
    """Whether ranks of LocalSGD exchange gradients, or updates of each step."""
    options, number = step.plan.options, step.number + 1
    first = number <= options["begin_step"]
    return averages_gradients(step) or (
        "compression" in options and (options["k_steps"] == 1 or first)
    )


def averages_gradients(step: Step) -> bool:
    """Whether LocalSGD averages gradients in this step."""
    plan = step.plan
    sgd = plan.optimizers[0]["name"] == "sgd"
    phase = plan.options.get("rule") == "torch" or not (sgd or "compression" in plan.options)
    return phase and step.number + 1 <= plan.options["begin_step"]


def check_sum(step: Step) -> None:
    """What is sent and what is kept is what was there and the gradients."""
    if step.kept_after is None:
        return
    for name in step.names:
        found = balance(step, name)
        if found is None:
            continue
        gain, sent, slack = found
        zero = torch.zeros_like(gain)
        before = step.kept.get(name, zero).double()
        after = step.kept_after.get(name, zero).double()
        close(sent + after, before + gain, step.plan, slack,
              f"step {step.number}, {name}: sent {sent}, kept {after}, before {before}, "
              f"gain {gain}")  # fmt: skip


def balance(step: Step, name: str) -> tuple[Tensor, Tensor, float] | None:
    """Gain, what is sent, and what rounding may add; None: not known."""
    if step.plan.local:
        return local_balance(step, name)
    first = step.ranks[0]
    zero = torch.zeros_like(first.before[name], dtype=torch.float64)
    if not step.used(name) or (step.overflows and step.plan.kind != "dense"):
        return zero, zero, 0.0
    if step.overflows:
        return None
    exchanged = first.exchanged.get(name, zero).double()
    for other in step.ranks[1:]:
        if not (step.plan.options.get("fused") and first.exchange in PACKETS):
            equal(other.exchanged, first.exchanged, f"gradients of step {step.number}")
    if step.plan.kind == "dgc":
        return dgc_balance(step, name, exchanged)
    return step.mean(name), exchanged, 0.0


def dgc_balance(step: Step, name: str, exchanged: Tensor) -> tuple[Tensor, Tensor, float]:
    plan, first = step.plan, step.ranks[0]
    names = split_names(plan, dict.fromkeys(step.names))[0]
    if name not in names or name.startswith("rows"):
        return step.mean(name), exchanged, 0.0
    options, sgd = plan.options, plan.optimizers[0]
    corrected = options.get("momentum_correction", True)
    early = sgd["weight_decay"] if options.get("decay_correction", True) else 0.0
    late = sgd["weight_decay"] if corrected and not early else 0.0
    momentum = sgd["momentum"] if corrected else 0.0
    w = first.before[name].double()
    moved = (w - first.after[name].double()) / plan.learning_rate
    slack = 2e-7 * float(w.abs().max()) / plan.learning_rate if w.numel() else 0.0
    fused = options["fused"] and first.exchange in PACKETS
    if corrected and not fused:
        close(moved, exchanged, plan, slack, f"step {step.number}: the optimizer moved {name}")
    states = [one.saved["holder"] for one in step.ranks if one.saved is not None]
    packets = first.exchange != "dense" and name in states[0]["v"]
    if not packets:
        x = clipped_mean(step, name, names) + (early or late) * w
        u = states[0]["u"][name].view(w.shape).double()
        return next_update(x, u, momentum, sgd["nesterov"])[1], exchanged, 0.0
    gains = []
    for rank, x in enumerate(clipped_own(step, name, names)):
        u = states[rank]["u"][name].view(w.shape).double()
        if first.exchange != "dense" and not states[rank]["switched"] and sgd["nesterov"]:
            u = u * momentum  # torch's velocity of the dense phase
        gains.append(accumulated(x + early * w, u, momentum, sgd["nesterov"]))
    hosts = plan.hosts if first.exchange == "hierarchical" else tuple(map(str, range(plan.ranks)))
    gain = torch.stack([gains[hosts.index(host)] for host in sorted(set(hosts))]).mean(0)
    if fused:
        return gain, moved, slack
    return gain, exchanged - late * w, 0.0


def accumulated(x: Tensor, u: Tensor, momentum: float, nesterov: bool) -> Tensor:
    """What a rank adds to the residual."""
    return momentum * (u + x) + x if nesterov else momentum * u + x


def next_update(x: Tensor, u: Tensor, momentum: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """Velocity and update of torch's SGD."""
    u = momentum * u + x
    return u, x + momentum * u if nesterov else u


def clipped_mean(step: Step, name: str, names: Collection[str]) -> Tensor:
    """The mean gradient, clipped to C as the uncompressed ones of DGC."""
    options, first = step.plan.options, step.ranks[0]
    limit = options["clip_norm"]
    states = first.saved["holder"] if first.saved is not None else {}
    alike = [
        n
        for n in names
        if step.used(n)
        and not n.startswith("rows")
        and (first.exchange == "dense" or n not in states["v"])
    ]
    alike = alike if options["clip"] == "global" else [name]
    found = {n: step.mean(n) for n in alike}
    return found[name] * factor(found.values(), limit)


def clipped_own(step: Step, name: str, names: Collection[str]) -> list[Tensor]:
    """The gradient of each rank, or of the host of each, clipped as those that DGC compresses."""
    plan, first = step.plan, step.ranks[0]
    options = plan.options
    hosts = plan.hosts if first.exchange == "hierarchical" else tuple(map(str, range(plan.ranks)))
    share = len(set(hosts)) / plan.ranks
    limit = None
    if options["clip_norm"] is not None:
        limit = options["clip_norm"] * math.sqrt(len(set(hosts)))
    states = first.saved["holder"] if first.saved is not None else {}
    alike = [n for n in names if n in states["v"]] if options["clip"] == "global" else [name]
    results = []
    for host in hosts:
        ranks = [one for one, h in zip(step.ranks, hosts, strict=True) if h == host]
        found = {}
        for n in alike:
            zero = torch.zeros_like(first.before[n], dtype=torch.float64)
            own = [one.own[n].double() for one in ranks if n in one.own]
            found[n] = sum(own, zero) * share
        results.append(found[name] * factor(found.values(), limit))
    return results


def factor(gradients: Iterable[Tensor], limit: float | None) -> float:
    """By which these are multiplied to have a norm of at most `limit`."""
    norm = math.sqrt(sum(float(x.double().square().sum()) for x in gradients))
    return 1.0 if limit is None or norm <= limit else limit / norm


def local_balance(step: Step, name: str) -> tuple[Tensor, Tensor, float] | None:
    plan, options, first = step.plan, step.plan.options, step.ranks[0]
    zero = torch.zeros_like(first.before[name], dtype=torch.float64)
    if not first.synced:
        return zero, zero, 0.0  # the kept stays
    if plan.kind == "muon" and first.before[name].dim() == 2 and zero.numel():
        return None
    moved = [one.moved[name].double() for ranks in step.window for one in ranks if one.moved]
    gain = sum(moved, zero) / plan.ranks
    theta = step.window[0][0].before[name].double()
    used = any(name in one.present and one.stepped[0] for ranks in step.window for one in ranks)
    decayed = theta
    if "compression" in options and plan.optimizers[0]["name"] == "adamw" and used:
        taken = sum(not skips_step(step, ranks) for ranks in step.window)
        decay = 1 - plan.learning_rate * plan.optimizers[0]["weight_decay"]
        decayed = theta * decay**taken
    sent = decayed - first.after[name].double()
    rounding = 4e-7 * float(theta.abs().max()) if theta.numel() else 0.0
    if "outer" in options and plan.dtype == torch.bfloat16:
        rounding *= 1 << 15  # the outer optimizer's rounding is lost
    outer = options.get("outer")
    if outer is not None and step.number + 1 > options["begin_step"]:
        if outer["momentum"]:
            return None
        return gain, sent / outer["lr"], rounding / outer["lr"]
    return gain, sent, rounding


def skips_step(step: Step, ranks: list[Record]) -> bool:
    """Whether all ranks skipped an earlier step of the window together, and so its decay."""
    one = Step(step.plan, ranks[0].step, ranks)
    return one.overflows and together(one)


def check_clipping(step: Step) -> None:
    """The optimizer of LocalSGD stepped with its own gradients, or with their mean, clipped."""
    plan, mean = step.plan, averages_gradients(step)
    limit = plan.options["clip_norm"]
    for one in step.ranks:
        if not one.stepped[0]:
            continue
        used = {n for n in step.names if (step.used(n) if mean else n in one.present)}
        zeros = {n: torch.zeros_like(one.before[n], dtype=torch.float64) for n in used}
        wanted = {n: step.mean(n) if mean else one.own.get(n, zeros[n]).double() for n in used}
        most = limit if limit is None or mean else limit * math.sqrt(plan.ranks)
        scale = factor(wanted.values(), most)
        assert one.stepping.keys() == used, f"step {step.number}: {one.stepping.keys()} != {used}"
        for name, x in wanted.items():
            what = f"step {step.number}, gradient of {name}"
            close(one.stepping[name].double(), x * scale, plan, 0.0, what)


def check_sum_of_all(plan: Plan, records: list[list[Record]], steps: Sequence[Step]) -> None:
    """Under join, over all steps: what was sent and what is kept is the sum of all gradients."""
    sgd = plan.optimizers[0]
    if plan.kind == "dgc" and (
        sgd["momentum"] or sgd["weight_decay"] or plan.options["clip_norm"] is not None
        or plan.options["fused"]
    ):  # fmt: skip
        return
    state = gathered_of(reversed([end for one in records for end in ends_of(one)]))
    last = [ends_of(one)[-1].gathered for one in records]
    state = next((one for one in last if one is not None), None)
    kept = {} if state is None else run_ranks(1, kept_of, plan, [state])[0][0]
    counted = [step for step in steps if not step.overflows]
    for name in steps[0].names if steps else ():
        zero = torch.zeros_like(steps[0].ranks[0].before[name], dtype=torch.float64)
        wanted = sum((step.mean(name) for step in counted), zero)
        sent = [step.ranks[0].exchanged[name] for step in counted if step.used(name)]
        got = sum((x.double() for x in sent), zero) + kept.get(name, zero).double()
        close(got, wanted, plan, 0.0, f"{name} under join: {got} != {wanted}")
