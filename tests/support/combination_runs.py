"""Trains the plans of combinations.py, and records what combination_checks.py judges."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from combinations import Model, Options, Plan, inputs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pycomm

Tensors = dict[str, Tensor]


@dataclass
class Record:
    """One step of one rank. Gradients are without loss scale, and dense.

    Attributes:
        before, after: the parameters, around the step.
        own: the sum of this rank's gradients, of the parameters that the rank used.
        present: parameters with a gradient before the exchange: `own`, or zeros of zero_grad.
        exchanged: p.grad after the backward pass.
        stepped: by optimizer, whether it stepped.
        stepping: LocalSGD: the gradients with which the optimizer stepped.
        moved: LocalSGD: what the optimizer's step subtracted.
        scale: the loss scale.
        saved, saved_after: a checkpoint before and after; None: under join.
        gathered: the state of all ranks after the step, on one of the ranks.
        exchange: the one in use.
        synced: LocalSGD: ranks averaged in this step.
    """

    step: int
    before: Tensors
    own: Tensors = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    exchanged: Tensors = field(default_factory=dict)
    stepped: list[bool] = field(default_factory=list)
    stepping: Tensors = field(default_factory=dict)
    moved: Tensors = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)
    scale: float = 1.0
    saved: Options | None = None
    saved_after: Options | None = None
    gathered: Any = None
    exchange: str = ""
    synced: bool = False


class Trainer:
    """A model of the plan and all that trains it, on one rank."""

    def __init__(self, plan: Plan, freeze_from: int = -1) -> None:
        self.plan = plan
        self.module = Model(plan)
        if freeze_from >= 0:
            self.freeze(freeze_from)
        self.named = dict(self.module.named_parameters())
        self.scaler = scaler_of(plan)
        self.own: Tensors = {}
        self.stepped: list[bool] = []
        self.stepping: Tensors = {}
        self.moved: Tensors = {}
        self.model: Any = self.module
        self.holder: Any = None  # of the compression's state, or LocalSGD
        self.optimizers = [
            optimizer_of(options, [(n, self.named[n]) for n in names])
            for options, names in zip(plan.optimizers, split(plan, self.named), strict=True)
        ]
        self.matrices: set[str] = set()  # that Muon steps
        self._wrap()
        self.steppers = [self.holder] if plan.local else self.optimizers
        self._watch()

    def _wrap(self) -> None:
        plan, options = self.plan, self.plan.options
        if plan.local:
            self.holder = self._local()
            return
        if plan.kind == "quantize":
            named, quantize = self.module.named_parameters(), pycomm.Quantize(**options)
            self.holder = pycomm.QuantizedGradients(named, quantize, scaler=self.scaler)
        elif plan.kind == "dgc":
            self.holder = pycomm.DGC(self.optimizers[0], scaler=self.scaler, **options)
        unused = bool({"branch", "branch first", "late", "never"} & set(plan.parts))
        if plan.ddp:
            self.model = DistributedDataParallel(self.module, find_unused_parameters=unused)
            hook = pycomm.dgc_hook if plan.kind == "dgc" else pycomm.quantize_hook
            self.model.register_comm_hook(self.holder, hook)
            return
        self.model = pycomm.DataParallel(
            self.module, self.holder, find_unused_parameters=unused, **plan.wrapper
        )

    def _local(self) -> pycomm.LocalSGD:
        options = dict(self.plan.options)
        if "compression" in options:
            given = options["compression"]
            options["compression"] = (pycomm.Quantize if "bits" in given else pycomm.TopK)(**given)
        if "outer" in options:
            options["outer"] = torch.optim.SGD(self.module.parameters(), **options["outer"])
        optimizer = self.optimizers[0]
        if self.plan.kind == "muon":
            self.matrices = {n for n, p in self.named.items() if p.dim() == 2 and p.numel()}
            matrices = [self.named[n] for n in self.named if n in self.matrices]
            options["muon"] = torch.optim.Muon(matrices, lr=self.plan.learning_rate)
            rest = [(n, p) for n, p in self.named.items() if n not in self.matrices]
            optimizer = self.optimizers[0] = optimizer_of(self.plan.optimizers[0], rest)
        return pycomm.LocalSGD(self.module, optimizer, **options)

    def _watch(self) -> None:
        """Hooks that record gradients and steps."""
        for name, p in self.named.items():
            if p.requires_grad:
                p.register_hook(_adds_to(self.own, name))
        for place, optimizer in enumerate(self.optimizers):
            optimizer.register_step_pre_hook(lambda *_: self._before_step())
            optimizer.register_step_post_hook(lambda *_, place=place: self._after_step(place))

    def _before_step(self) -> None:
        if self.plan.local:
            self.stepping = self.gradients()
            self.moved = self.parameters()

    def _after_step(self, place: int) -> None:
        self.stepped[place] = True
        now = self.parameters()
        self.moved = {name: x - now[name] for name, x in self.moved.items()}

    def parameters(self) -> Tensors:
        return {name: p.detach().clone() for name, p in self.named.items()}

    def gradients(self) -> Tensors:
        found = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        return {name: dense(gradient).clone() for name, gradient in found.items()}

    def freeze(self, step: int) -> None:
        if "late" in self.plan.parts and step >= self.plan.frozen_from:
            self.module.late.requires_grad_(False)

    def step(self, rank: int, step: int) -> Record:
        """One step of the plan, as a user writes it."""
        plan = self.plan
        record = Record(step, self.parameters())
        if self.scaler is not None:
            record.scale = self.scaler.get_scale()
        self.freeze(step)
        for one in self.steppers:
            one.zero_grad(set_to_none=plan.to_none)
        record.present = set(self.gradients())
        self.own.clear()
        self.stepped = [False] * len(self.optimizers)
        self.stepping, self.moved = {}, {}
        self._backward(rank, step)
        record.own = {name: x / record.scale for name, x in self.own.items()}
        record.present |= set(record.own)
        record.exchanged = {n: x / record.scale for n, x in self.gradients().items()}
        self._step()
        record.after, record.stepped = self.parameters(), self.stepped
        record.stepping, record.moved = self.stepping, self.moved
        if plan.local:
            record.synced = self.holder.last_sync == self.holder.step_count
        if self.holder is not None:
            record.exchange = self.holder.stats().get("exchange", "")
        return record

    def _backward(self, rank: int, step: int) -> None:
        plan, handles = self.plan, []
        wrong = plan.overflows.get(step)
        for micro in range(plan.micro):
            last = micro == plan.micro - 1
            if last and wrong is not None and wrong[0] == rank:
                p = self.named[wrong[1]]
                handles.append(p.register_hook(lambda g: g * float("inf")))
            apart = plan.local or last
            with contextlib.nullcontext() if apart else self.model.no_sync():
                loss = self.model(*inputs(plan, rank, step, micro)) / plan.micro
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        for handle in handles:
            handle.remove()

    def _step(self) -> None:
        plan, scaler = self.plan, self.scaler
        if plan.clip is not None:
            for optimizer in self.optimizers if scaler is not None else ():
                scaler.unscale_(optimizer)
            found = [p for p in self.module.parameters() if p.grad is not None]
            nn.utils.clip_grad_norm_([p for p in found if not p.grad.is_sparse], plan.clip)
        for one in self.steppers:
            if scaler is None:
                one.step()
            elif any(p.grad is not None for group in one.param_groups for p in group["params"]):
                scaler.step(one)  # it raises without a gradient
        if scaler is not None:
            scaler.update()

    @property
    def _holders(self) -> dict[str, Any]:
        found = {"module": self.module, "holder": self.holder, "scaler": self.scaler}
        found |= {f"optimizer {i}": one for i, one in enumerate(self.optimizers)}
        return {name: one for name, one in found.items() if one is not None}

    def saved(self) -> Options:
        """A checkpoint of this rank."""
        return {name: copy.deepcopy(one.state_dict()) for name, one in self._holders.items()}

    def load(self, saved: Options, step: int) -> None:
        """Loads a checkpoint, in an order of the seed; LocalSGD's after the model it averages."""
        names = list(self._holders)
        random.Random(f"{self.plan.seed} {step}").shuffle(names)
        if self.plan.local:
            names.sort(key=lambda name: name == "holder")
        for name in names:
            self._holders[name].load_state_dict(copy.deepcopy(saved[name]))

    def gathered(self, dst: int) -> Any:
        """Collective. The state of all ranks on rank `dst`; None: there is none."""
        has = self.holder is not None and (
            not self.plan.local or "compression" in self.plan.options
        )
        return copy.deepcopy(self.holder.gather_state(dst)) if has else None


def _adds_to(own: Tensors, name: str) -> Callable[[Tensor], None]:
    """A hook of autograd. It does not refer to the trainer, which would be a cycle through C++."""

    def add(gradient: Tensor) -> None:
        found = dense(gradient)
        own[name] = own[name] + found if name in own else found.clone()

    return add


def dense(x: Tensor) -> Tensor:
    return (x.to_dense() if x.is_sparse else x).detach()


def split(plan: Plan, named: dict[str, nn.Parameter]) -> list[list[str]]:
    """The parameters of each optimizer. A sparse one is in the last SGD."""
    count = len(plan.optimizers)
    draw = random.Random(f"{plan.seed} split")
    found: list[list[str]] = [[] for _ in range(count)]
    sgds = [i for i, options in enumerate(plan.optimizers) if options["name"] == "sgd"]
    for place, name in enumerate(named):
        at = place if place < count else draw.randrange(count)  # none is empty
        found[sgds[-1] if name.startswith("rows") else at].append(name)
    return found


def optimizer_of(options: Options, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """A sparse parameter has a group without momentum and decay."""
    given = dict(options)
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[given.pop("name")]
    sparse = [(name, p) for name, p in named if name.startswith("rows")]
    rest = [(name, p) for name, p in named if not name.startswith("rows")]
    plain = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    groups: list[Any] = [{"params": rest}] if rest else []
    groups += [{"params": sparse, **plain}] if sparse else []
    return kind(groups, **given)


def scaler_of(plan: Plan) -> torch.amp.GradScaler | None:
    if plan.scaler == "static":
        return pycomm.StaticLossScaler(4.0)
    if plan.scaler == "torch":
        return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return None


def train(rank: int, plan: Plan) -> list[Record]:
    """The whole plan on one rank, and again from each checkpoint."""
    trainer = Trainer(plan)
    found: list[Record] = []
    for epoch, counts in enumerate(plan.epochs):
        start = trainer.saved()
        records = list(run_epoch(trainer, rank, epoch))
        for record in () if plan.join else records:
            resume(plan, rank, record)
        if plan.join:
            end, gathered = trainer.saved(), trainer.gathered(0)
            resume_epoch(plan, rank, epoch, start, end)
            if records and len(records) == max(counts):
                records[-1].gathered = gathered
            found.append(Record(-1, start["module"], after=dict(trainer.parameters())))
            found[-1].gathered = gathered
        found += records
    return found


def train_under_ddp(plan: Plan) -> list[Record]:
    """For the processes of torch_ranks.py."""
    return train(torch.distributed.get_rank(), plan)


def run_epoch(trainer: Trainer, rank: int, epoch: int) -> Iterator[Record]:
    """The records of the steps of this rank."""
    plan = trainer.plan
    steps = plan.steps_of(epoch)[: plan.epochs[epoch][rank]]
    if plan.join:
        others = [*trainer.optimizers, *([trainer.scaler] if trainer.scaler else [])]
        with trainer.model.join(*others):
            yield from [trainer.step(rank, step) for step in steps]
        return
    for step in steps:
        saved = trainer.saved()
        record = trainer.step(rank, step)
        record.saved, record.saved_after = saved, trainer.saved()
        record.gathered = trainer.gathered(step % plan.ranks)
        yield record


def resumed(plan: Plan, saved: Options, step: int) -> Trainer:
    trainer = Trainer(plan, step if plan.freeze_first and not plan.local else -1)
    trainer.load(saved, step)
    return trainer


def frozen_before(plan: Plan, step: int) -> bool:
    """Whether a resumed program freezes a parameter that has a state, before it loads."""
    return (
        plan.freeze_first and not plan.local and "late" in plan.parts and (step >= plan.frozen_from)
    )


def resume(plan: Plan, rank: int, record: Record) -> None:
    """A new program that loads the checkpoint before a step takes the same step, bit for bit."""
    assert record.saved is not None
    trainer = resumed(plan, record.saved, record.step)
    again = trainer.step(rank, record.step)
    if not comparable(plan, record.exchange, again.exchange):
        return
    where = f"resumed before step {record.step}, rank {rank}"
    if frozen_before(plan, record.step):
        if plan.kind != "dgc":  # which does not count it for k, and makes shards anew
            check_same(record.after, again.after, f"{where}: parameters")
        return
    check_same(record.after, again.after, f"{where}: parameters")
    check_same(record.saved_after, trainer.saved(), f"{where}: state")


def resume_epoch(plan: Plan, rank: int, epoch: int, start: Options, end: Options) -> None:
    trainer = resumed(plan, start, plan.steps_of(epoch).start)
    list(run_epoch(trainer, rank, epoch))
    if frozen_before(plan, plan.steps_of(epoch).start):
        return
    if comparable(plan, "", ""):
        check_same(end, trainer.saved(), f"resumed before epoch {epoch}, rank {rank}")


def comparable(plan: Plan, one: str, other: str) -> bool:
    """Whether a resumed step has the same bits: not if measured times chose another exchange, or
    gradients that zero_grad kept are not there."""
    timed = "auto_time" in (
        plan.options.get("exchange"),
        plan.options.get("compression", {}).get("exchange"),
    )
    kept = not plan.to_none and {"branch", "branch first", "late"} & set(plan.parts)
    return plan.bitwise and one == other and not (timed and plan.join) and not kept


def check_same(wanted: Any, got: Any, where: str) -> None:
    """Bitwise equality of nested values."""
    if isinstance(wanted, Tensor):
        same = isinstance(got, Tensor) and torch.equal(wanted, got)
        assert same, f"{where}: {wanted} != {got}"
    elif isinstance(wanted, dict):
        assert wanted.keys() == got.keys(), f"{where}: {list(wanted)} != {list(got)}"
        for key, value in wanted.items():
            check_same(value, got[key], f"{where} {key}")
    elif isinstance(wanted, list | tuple):
        assert len(wanted) == len(got), f"{where}: {len(wanted)} != {len(got)}"
        for place, (one, other) in enumerate(zip(wanted, got, strict=True)):
            check_same(one, other, f"{where} {place}")
    else:
        assert wanted == got, f"{where}: {wanted} != {got}"


def kept_of(group: pycomm.Group, plan: Plan, gathered: list[Any]) -> list[Tensors]:
    """What the ranks have not sent, as a part of the mean gradient: the residual of one rank that
    loads the states of all."""
    trainer = Trainer(plan)
    names = [name for name, p in trainer.named.items() if p.requires_grad]
    found = []
    for state in gathered:
        if state is None:
            found.append({})
            continue
        trainer.holder.load_state_dict(copy.deepcopy(state))
        saved = trainer.holder.state_dict()
        rows = saved["v"] if plan.kind == "dgc" else saved["residual"]
        by_name = rows if isinstance(rows, dict) else dict(zip(names, rows, strict=True))
        scale = saved.get("scale", 1.0)
        found.append({n: (x / scale).view(trainer.named[n].shape) for n, x in by_name.items()})
    return found
