"""What every compression promises, whatever exchanges it: no gradient is lost, also if an exchange
fails, a parameter that no rank used stays as it is, all ranks skip alike, a state resumes bit for
bit, and misuse raises.

Ranks are threads; hooks of torch's DDP run in processes. Misuse: test_compression_misuse.py.
"""

import copy
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import (
    COMPRESSED,
    COUNT,
    DGC,
    GRADIENTS,
    HOSTS,
    LOCAL,
    PLAIN,
    QUANTIZE,
    Trained,
    compression_of,
    data,
    trained,
    unsent,
)
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch_ranks import Run, run_fixture  # noqa: F401 - a fixture

import pycomm
from pycomm._training.coalesced import bcast_value
from pycomm._training.communicators import CommunicatorPool
from pycomm.compress.bucket import CompressionBucket
from pycomm.testing import run_ranks

every = pytest.mark.parametrize("form", COMPRESSED)


class Branches(nn.Module):
    """The gradient of a branch is the input, if it is used."""

    def __init__(self, *, b_first: bool = False) -> None:
        super().__init__()
        for name in "ba" if b_first else "ab":
            setattr(self, name, nn.Parameter(torch.zeros(COUNT)))

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        loss: Tensor = (self.a * x).sum()
        return loss + (self.b * x.flip(0)).sum() if use_b else loss


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def state_of(made: Trained, form: str, name: str) -> list[Tensor]:
    """What the compression keeps of a parameter."""
    state = made.holder.state_dict()
    if form in LOCAL:
        return [state["residual"][[n for n, _ in made.module.named_parameters()].index(name)]]
    found = [state.get(key, {}).get(name) for key in ("u", "v", "residual", "owner_residual")]
    return [x for x in found if x is not None]


def uses_b(rank: int, step: int) -> bool:
    """Both, no rank for four steps, rank 0, no rank, both."""
    return step in (0, 1, 2, 9, 10) or (step == 7 and rank == 0)


def with_a_branch(
    group: pycomm.Group, form: str, to_none: bool, b_first: bool, options: dict[str, Any]
) -> Any:
    made = trained(form, Branches(b_first=b_first), **options)
    for step in range(11):
        idle = not any(uses_b(rank, step) for rank in range(group.size))
        before = made.module.b.detach().clone(), state_of(made, form, "b")
        use = uses_b(group.rank, step)
        x = data(group.rank, step)
        made.step(lambda model, x=x, use=use: model(x, use), to_none)
        if idle and to_none:
            assert made.module.b.grad is None
            assert torch.equal(before[0], made.module.b) or form == "topk every 2"
        if idle and to_none and step not in (3, 8) and not options:  # an owner may be chosen anew
            now = state_of(made, form, "b")
            assert all(torch.equal(x, y) for x, y in zip(before[1], now, strict=True))
    return made.module.a.detach(), made.module.b.detach(), made.holder.gather_state(0)


def check_sums(form: str, found: list[Any], b_first: bool = False) -> None:
    """The weights have moved by the mean of all gradients, less what is not sent."""
    size = len(found)
    residuals = unsent(form, lambda: Branches(b_first=b_first), found[0][2])
    rest = dict(zip("ba" if b_first else "ab", residuals, strict=True))
    every_step = [(r, s) for r in range(size) for s in range(11)]
    a = sum((data(r, s) for r, s in every_step), torch.zeros(COUNT))
    b = sum((data(r, s).flip(0) for r, s in every_step if uses_b(r, s)), torch.zeros(COUNT))
    close(rest["a"] - found[0][0], a / size)
    close(rest["b"] - found[0][1], b / size)
    for one in found[1:]:
        assert torch.equal(one[0], found[0][0])
        assert torch.equal(one[1], found[0][1])


@every
@pytest.mark.parametrize(("size", "to_none"), [(1, True), (2, True), (2, False), (3, True)])
def test_a_branch_that_no_rank_uses_loses_nothing(form: str, size: int, to_none: bool) -> None:
    first = form in ("dgc sharded model", "topk sharded")
    check_sums(form, run_ranks(size, with_a_branch, form, to_none, first, {}), first)


@pytest.mark.parametrize("form", HOSTS)
def test_a_branch_that_no_host_uses_loses_nothing(form: str) -> None:
    hosts = ["a", "a", "b", "b"]
    options = HOSTS[form]
    found = run_ranks(
        4, with_a_branch, form, True, False, options, transport="tcp", host_names=hosts
    )
    check_sums(form, found)


def test_an_unused_branch_does_not_keep_others_from_being_selected() -> None:
    """Its residual is large and stays; with one k for all, it would be selected in each step."""

    def program(group: pycomm.Group, form: str) -> Tensor:
        made = trained(form, Branches())
        made.step(lambda model: model(100 * data(group.rank, 0), True))
        for step in range(1, 12):
            x = data(group.rank, step)
            made.step(lambda model, x=x: model(x, False))
        return (made.module.a != 0).float().mean()

    for form in ("dgc model", "dgc sharded model", "topk", "topk sharded"):
        assert run_ranks(2, program, form)[0] > 0.4, form


@pytest.mark.parametrize("options", [{"rampup_begin_step": 1000}, {"min_count": 1 << 20}])
def test_dense_momentum_of_an_unused_branch_is_that_of_torch(options: dict[str, Any]) -> None:
    def sgd(module: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(module.parameters(), 0.1, 0.9, weight_decay=0.1)

    def program(group: pycomm.Group) -> list[Tensor]:
        module = Branches()
        made = trained("dgc", module, sgd(module), **options)
        for step in range(11):
            use = uses_b(0, step)
            made.step(lambda m, s=step, use=use: m(data(group.rank, s), use))
        return [module.a.detach(), module.b.detach()]

    alone = Branches()
    optimizer = sgd(alone)
    for step in range(11):
        optimizer.zero_grad()
        (sum(alone(data(r, step), uses_b(0, step)) for r in range(2)) / 2).backward()
        optimizer.step()
    for got, want in zip(run_ranks(2, program)[0], [alone.a, alone.b], strict=True):
        close(got, want.detach())


class Broken(Exception):
    """The error of a transfer."""


class Late:
    """A transfer that completes, and then fails on this rank: at its end, or on a device after it
    was enqueued."""

    def __init__(self, work: Any, when: str) -> None:
        self._work, self._when = work, when

    def wait(self) -> None:
        self._work.wait()
        if self._when == "end":
            raise Broken

    def wait_for_device(self) -> None:
        self._work.wait_for_device()
        raise Broken


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the transfers of each thread, and fails with its number "start " + thread, "end " +
    thread, or "enqueued " + thread: the names say when. "decode " + thread fails afterwards, as
    where memory is short."""
    counts: dict[str, int] = defaultdict(int)

    def breaks(real: Any) -> Any:
        def call(*given: Any) -> Any:
            me = threading.current_thread().name
            counts[me] += 1
            if counts[me] == counts.get("start " + me):
                raise Broken
            work = real(*given)
            for when in ("end", "enqueued"):
                if counts[me] == counts.get(f"{when} {me}"):
                    return Late(work, when)
            return work

        return call

    for verb in ("all_reduce", "all_gather", "all_gather_v", "all_to_all", "all_to_all_v"):
        monkeypatch.setattr(CommunicatorPool, verb, breaks(getattr(CommunicatorPool, verb)))
    decode = CompressionBucket.decode

    def decoding(*given: Any) -> None:
        if "decode " + threading.current_thread().name in counts:
            raise Broken
        decode(*given)

    monkeypatch.setattr(CompressionBucket, "decode", decoding)
    return counts


FAILURES = [(form, when) for form in COMPRESSED for when in ("start", "end", "enqueued")]
DECODED = ("dgc", "dgc model", "dgc 2bit", "dgc sharded", "dgc ramp", "dgc unmasked")


@pytest.mark.parametrize(("form", "when"), [*FAILURES, *((form, "decode") for form in DECODED)])
def test_failed_step_sends_nothing(form: str, when: str, breaking: dict[str, int]) -> None:
    """It fails at its start, in its last transfer or after it, on all ranks, and so does the next.
    Parameters stay, and no gradient is lost; dense and quantized gradients are dropped.
    """
    failed = 6, 7

    def program(group: pycomm.Group) -> Any:
        made, me, calls = trained(form, Branches()), threading.current_thread().name, 0
        for step in range(11):
            x, before = data(group.rank, step), made.module.a.detach().clone()
            begin = breaking[me]
            if step not in failed:
                made.step(lambda model, x=x: model(x, True))
                calls = breaking[me] - begin or calls
                continue
            at = f"{when} {me}"
            breaking[at] = begin + (1 if when == "start" else calls)
            with pytest.raises(Broken):
                made.step(lambda model, x=x: model(x, True))
            del breaking[at]
            assert torch.equal(before, made.module.a) or form == "topk every 2"
            assert form not in LOCAL or all(made.holder.state_dict()["used"])
        return made.module.a.detach(), made.module.b.detach(), made.holder.gather_state(0)

    found = run_ranks(2, program)
    residuals = unsent(form, Branches, found[0][2])
    dropped = failed if form in (*QUANTIZE, "dgc small", "dgc dense") else ()
    taken = [(r, s) for r in range(2) for s in range(11) if s not in dropped]
    close(residuals[0] - found[0][0], sum(data(*one) for one in taken) / 2)
    close(residuals[1] - found[0][1], sum(data(*one).flip(0) for one in taken) / 2)
    assert torch.equal(found[0][0], found[1][0])


SCALERS: dict[str, Callable[[], Any]] = {
    "static": lambda: pycomm.StaticLossScaler(4.0),
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=8.0),
}


@pytest.mark.parametrize("form", GRADIENTS)
@pytest.mark.parametrize("scaler", SCALERS)
def test_an_overflow_skips_both_optimizers_on_all_ranks(form: str, scaler: str) -> None:
    """In the parameter of either, on one rank; what was sent and kept is the rest."""
    overflows = {2: "a", 4: "b", 6: "a"}

    def program(group: pycomm.Group) -> Any:
        module, scale = Branches(b_first=scaler == "torch"), SCALERS[scaler]()
        one, other = (torch.optim.SGD([p], lr=1.0) for p in (module.a, module.b))
        compression = compression_of(form, module, one, scale)
        model = pycomm.DataParallel(module, compression=compression, bucket_layers=1)
        for step in range(8):
            one.zero_grad()
            other.zero_grad()
            loss = scale.scale(model(data(group.rank, step), True))
            before = module.a.detach().clone(), module.b.detach().clone()
            handles = []
            if group.rank == 1 and step in overflows:
                wrong = getattr(module, overflows[step])
                handles = [wrong.register_hook(lambda g: g * float("inf"))]
            loss.backward()
            for handle in handles:
                handle.remove()
            scale.step(one)
            scale.step(other)
            scale.update()
            for p, old in zip((module.a, module.b), before, strict=True):
                assert torch.equal(p, old) == (step in overflows), step
        return module.a.detach(), module.b.detach(), compression.gather_state(0), scale.get_scale()

    found = run_ranks(2, program)
    for i in (0, 1, 3):
        assert torch.equal(torch.as_tensor(found[0][i]), torch.as_tensor(found[1][i]))
    names = "ba" if scaler == "torch" else "ab"
    taken = [(r, s) for r in range(2) for s in range(8) if s not in overflows]
    if form in DGC:  # it compresses the parameters of its own optimizer
        alone = nn.ParameterDict({"a": nn.Parameter(torch.zeros(COUNT))})
        rest = {"a": unsent(form, lambda: alone, found[0][2])[0], "b": torch.zeros(COUNT)}
    else:
        residuals = unsent(form, lambda: Branches(b_first=names == "ba"), found[0][2])
        rest = dict(zip(names, residuals, strict=True))
    close(rest["a"] - found[0][0], sum(data(*one) for one in taken) / 2)
    close(rest["b"] - found[0][1], sum(data(*one).flip(0) for one in taken) / 2)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.a, self.b = (nn.Linear(8, 8) for _ in range(2))
        for p in self.parameters():
            nn.init.uniform_(p, -0.4, 0.4, generator=made)

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        y: Tensor = torch.tanh(self.a(x))
        return self.b(y) if use_b else y


def decayed(module: nn.Module, form: str) -> torch.optim.Optimizer:
    if form in DGC:
        return torch.optim.SGD(module.parameters(), 0.1, 0.9, weight_decay=0.1, nesterov=True)
    return torch.optim.AdamW(module.parameters(), 0.01, (0.0, 0.99), weight_decay=0.1)


def with_muon(module: nn.Module) -> Trained:
    """Muon trains the matrices, AdamW the rest."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    rest = [p for p in trainable if p.dim() != 2]
    optimizer = torch.optim.AdamW(rest, 0.01, (0.0, 0.99), weight_decay=0.1)
    muon = torch.optim.Muon([p for p in trainable if p.dim() == 2], lr=0.02)
    return trained("topk all", module, optimizer, muon=muon)


def tensors(made: Trained) -> list[Tensor]:
    """Those of a checkpoint."""
    return [x for x in tree_leaves(made.saved()) if isinstance(x, Tensor)]


@on_ranks(2)
@pytest.mark.parametrize("form", ["topk", "local quantize", "muon"])
def test_an_overflow_skips_the_local_step_on_all_ranks(group: pycomm.Group, form: str) -> None:
    """Parameters and the state stay, of the optimizers too."""
    module, scaler = Layers(), torch.amp.GradScaler("cpu", init_scale=64.0)
    made = with_muon(module) if form == "muon" else trained(form, module, decayed(module, form))
    for step in range(6):
        before = tensors(made)
        made.stepper.zero_grad()
        loss = module(data(group.rank, step).view(-1, 8), True).square().mean()
        overflow = group.rank == 1 and step in (2, 3)
        scaler.scale(loss * float("inf") if overflow else loss).backward()
        scaler.step(made.stepper)
        scaler.update()
        same = zip(before, tensors(made), strict=step > 0)  # the first step makes states
        assert all(torch.equal(x, y) for x, y in same) == (step in (2, 3))


OUTER = {"outer": "local", "outer topk": "topk", "outer quantize": "local quantize"}


@on_ranks(2)
@pytest.mark.parametrize("how", ["frozen", "unused"])
@pytest.mark.parametrize("form", [*COMPRESSED, *PLAIN, *OUTER, "muon"])
def test_a_parameter_without_gradient_stays(group: pycomm.Group, form: str, how: str) -> None:
    module = Layers()
    optimizer, options, name = decayed(module, form), {}, form
    if form.startswith("outer"):
        outer = torch.optim.SGD(module.parameters(), 0.7, 0.9, weight_decay=0.1)
        options, name = {"outer": outer}, OUTER[form]
    made = with_muon(module) if form == "muon" else trained(name, module, optimizer, **options)
    for step in range(8):
        if how == "frozen" and step == 4:
            module.b.requires_grad_(False)
        before = [p.detach().clone() for p in module.b.parameters()]
        x = data(group.rank, step).view(-1, 8)
        use = how == "frozen" or step < 4
        made.step(lambda model, x=x, use=use: model(x, use).square().mean())
        if step >= 4 and not (name == "topk every 2" and step == 4):
            same = zip(before, module.b.parameters(), strict=True)
            assert all(torch.equal(x, y) for x, y in same), step


class Mixed(nn.Module):
    """A sparse embedding, tied, frozen and empty parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(11, 8, sparse=kind == "sparse")
        self.a, self.c, self.b = nn.Linear(8, 40), nn.Linear(8, 40), nn.Linear(40, 8)
        self.empty = nn.Parameter(torch.zeros(0))
        for p in self.parameters():
            nn.init.uniform_(p, -0.4, 0.4, generator=made)
        if kind == "tied":
            self.b.weight = nn.Parameter(self.b.weight.detach())
            self.c.weight = self.a.weight
        self.c.requires_grad_(kind != "frozen")

    def forward(self, rows: Tensor, use_c: bool) -> Tensor:
        x = self.embedding(rows)
        y = torch.tanh(self.a(x) + (self.c(x) if use_c else 0)) + self.empty.sum()
        return self.b(y).square().mean()


@pytest.mark.parametrize("kind", ["sparse", "tied", "frozen"])
@pytest.mark.parametrize("form", [*COMPRESSED, "muon"])
def test_a_state_resumes_bit_for_bit(form: str, kind: str) -> None:
    """From each rank's own state and from that of all."""

    def make() -> Trained:
        module = Mixed(kind)
        if form == "muon":
            module.embedding.sparse = False
            return with_muon(module)
        apart = [p for p in module.parameters() if not p.requires_grad]
        apart += [module.embedding.weight] if kind == "sparse" else []
        rest = [p for p in module.parameters() if all(p is not one for one in apart)]
        groups = [{"params": rest, "momentum": 0.9}, {"params": apart}]
        return trained(form, module, torch.optim.SGD(groups, lr=0.05))

    def steps(group: pycomm.Group, made: Trained, first: int, last: int) -> list[Tensor]:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(10 * step + group.rank)
            rows = torch.randint(0, 11, (6,), generator=generator)
            made.step(lambda model, rows=rows, step=step: model(rows, step not in (3, 4)))
        return [p.detach().clone() for p in made.module.parameters()]

    def program(group: pycomm.Group) -> None:
        one = make()
        steps(group, one, 0, 3)  # "topk every 2" is between two averages
        saved, every = one.saved(), copy.deepcopy(one.holder.gather_state(1))
        assert (every is not None) == (group.rank == 1)
        wanted = steps(group, one, 3, 8)
        for state in (saved[2], bcast_value(every, 1, group)):
            two = make()
            two.load([*saved[:2], state])
            for x, y in zip(wanted, steps(group, two, 3, 8), strict=True):
                assert torch.equal(x, y)

    run_ranks(2, program)


def under_ddp(to_none: bool, forms: list[str]) -> list[Any]:
    found = []
    rank = torch.distributed.get_rank()
    for form in forms:
        module = Branches()
        optimizer = torch.optim.SGD(module.named_parameters(), lr=1.0)
        compression = compression_of(form, module, optimizer, None)
        ddp = DistributedDataParallel(module, find_unused_parameters=True)
        hook = pycomm.dgc_hook if form in DGC else pycomm.quantize_hook
        ddp.register_comm_hook(compression, hook)
        made = Trained(module, ddp, optimizer, optimizer, compression)
        for step in range(11):
            x, use = data(rank, step), uses_b(rank, step)
            made.step(lambda model, x=x, use=use: model(x, use), to_none)
        parts = module.a.detach(), module.b.detach(), compression.gather_state(0)
        found.append(parts)
        if form in DGC:
            optimizer.zero_grad()
            made.model(data(rank, 0), True).backward()
            with pytest.raises(pycomm.errors.InvalidArgument, match="had exchanged"):
                made.model(data(rank, 1), True).backward()
    return found


def test_hooks_of_ddp_lose_nothing(run: Run) -> None:
    for to_none in (True, False):
        found = run(2, under_ddp, to_none, GRADIENTS)
        for i, form in enumerate(GRADIENTS):
            check_sums(form, [one[i] for one in found])
