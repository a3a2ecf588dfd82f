"""What rows of the pages say is so: calls fit the signatures, and each remark of docs/migration.md
on a difference is checked here, with two ranks, or by a named test.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from paths import ROOT
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import RandomSampler, SubsetRandomSampler

import pycomm
from pycomm import Group, config, data, errors, kernels, metrics, torch_backend
from pycomm._arguments import also_named
from pycomm._training.communicators import CommunicatorPool
from pycomm.parallel.buckets import Limits
from pycomm.testing import run_ranks

# The cells of the tables: a name of another library, ours, and the differences.
MIGRATION = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for table in (ROOT / "docs" / "migration.md").read_text().split("|---|---|---|\n")[1:]
    for line in table.partition("\n\n")[0].splitlines()
]
REMARKS = {differences for _, _, differences in MIGRATION} - {""}
NO_CLAIMS = {
    "see below",
    "see [rank failures](training.md#rank-failures)",
    "training is synchronous data parallel, or LocalSGD",
    "no ssh",
    "a decorator of `train`",
    "strategies are its arguments",
}
HELD_BY = {  # claims that other tests hold
    "divides once, after the sum: the same bits with 2 ranks; limits buckets by layers too": (
        "test_the_same_bits_as_ddp",
        "test_fusion_by_bytes_and_layers",
    ),
    "one log per rank; the first failure is printed first": (
        "test_places_tables_and_logs",
        "test_the_first_failure_is_named_first",
    ),
    "prints the configuration tables; `--log-dir` for logs": ("test_places_tables_and_logs",),
    "the same line on each host, with one endpoint for all": ("test_example_of_two_hosts_runs",),
    "every `Timeout` names the missing ranks": ("test_call_times_out_and_names_the_missing_rank",),
    "call `pycomm.barrier()` at the end to wait for all": (
        "test_rank_failure_is_reported_only_in_groups_with_the_rank",
    ),
    'processes are spawned: the script needs `if __name__ == "__main__":`': (
        "test_script_without_a_main_guard_is_reported",
    ),
    "atomic; all ranks raise on failure": (
        "test_a_write_that_fails_leaves_nothing",
        "test_invalid_path_fails_on_every_rank",
    ),
    "one callback for all parameters; packed, sent during backward": ("test_callback",),
    "wraps the model; no negotiation: all ranks produce gradients in the same order": (
        "test_ranks_with_different_gradient_orders",
    ),
    "sparse; keeps the rounding error in the residual": ("test_nothing_is_lost",),
    "all_gather returns [size, ...]; gradients of gradients too": (
        "test_gradients_equal_those_of_one_process",
    ),
    "in place; `pycomm.functional.all_reduce` has gradients": (
        "test_gradients_equal_those_of_one_process",
    ),
    "torch's raises an error on the CPU; `group=` in place of `process_group=`": (
        "test_equals_one_process_with_the_whole_batch",
        "test_conversion",
    ),
    "on the CPU too": ("test_equals_one_process_with_the_whole_batch",),
    "`momentum=0.1` is MegEngine's 0.9; `eval()` of the layer in place of `freeze=True`": (
        "test_evaluation_and_a_single_rank_are_torchs_layer",
    ),
    "or without arguments, by the environment": (
        "test_processes_rendezvous_by_arguments",
        "test_variables_of_each_launcher_are_read",
    ),
}
KINDS = ("float32", "float64", "float32", "int64")
Check = Callable[[Group], None]
CHECKS: dict[str, Check] = {}


def holds(*remarks: str) -> Callable[[Check], Check]:
    """Registers the check of remarks."""

    def register(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(remarks, check))
        return check

    return register


def numbers(group: Group) -> torch.Tensor:
    return torch.tensor([1.0, 2.0]) + group.rank


@holds("no import of torch needed")
def no_torch(group: Group) -> None:
    code = "import sys, pycomm; pycomm.init(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@holds("`bucket_cap_mb` is accepted; move the module to its device first")
def arguments_of_ddp(group: Group) -> None:
    pycomm.DataParallel(nn.Linear(2, 2), bucket_cap_mb=1)
    with pytest.raises(TypeError, match="move the module to its device"):
        pycomm.DataParallel(nn.Linear(2, 2), device_ids=[0])


@holds("a group has `group.rank`, `group.size`", "the default group")
def rank_and_size(group: Group) -> None:
    assert (group.rank, group.size) == (pycomm.rank(), pycomm.size())
    assert pycomm.all_reduce(numbers(group), group=None).tolist() == [3, 5]


@holds("returns a `Work`")
def work(group: Group) -> None:
    x = numbers(group)
    sent = pycomm.send(x, 1 - group.rank, async_op=True)
    received = pycomm.recv(torch.empty(2), 1 - group.rank, async_op=True)
    for call in (sent, received):
        assert isinstance(call, pycomm.Work)
        call.wait()


@holds("returns `x`; takes torch's `ReduceOp` too", "in place")
def reduce_op(group: Group) -> None:
    x = numbers(group)
    assert pycomm.all_reduce(x, op=torch.distributed.ReduceOp.SUM) is x
    assert x.tolist() == [3, 5]


@holds(
    "returns [size, ...], without gradient",
    "stacked, not concatenated; `all_gather_v` for different counts",
)
def gathered(group: Group) -> None:
    x = numbers(group).requires_grad_()
    got = pycomm.all_gather(x)
    assert got.tolist() == [[1, 2], [2, 3]]
    assert not got.requires_grad
    parts = pycomm.all_gather_v(numbers(group)[group.rank :])
    assert [part.tolist() for part in parts] == [[1, 2], [3]]


@holds("plain values only, no pickle")
def plain(group: Group) -> None:
    assert pycomm.all_gather_object({"a": (group.rank, None)})[1] == {"a": (1, None)}
    with pytest.raises(errors.InvalidArgument, match="not a plain value"):
        pycomm.all_gather_object(object())


@holds("collective over the parent; returns None with `color=None`")
def split(group: Group) -> None:
    part = group.split(None if group.rank else 0)
    assert (part is None) == (group.rank == 1)


@holds("repeats samples only with `pad=True`; counts epochs")
def epochs(group: Group) -> None:
    def read(loader: data.DataLoader) -> list[list[int]]:
        return pycomm.all_gather_object([int(x) for batch in loader for x in batch])

    loader = data.DataLoader(list(range(9)), shuffle=True)
    first, second = read(loader), read(loader)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(9))
    assert first != second
    padded = data.DataLoader(list(range(9)), pad=True)
    assert [len(part) for part in read(padded)] == [5, 5]
    assert padded.padding == group.rank


@holds("divides torch's sequential and random samplers; others must know the ranks")
def samplers(group: Group) -> None:
    whole = list(range(8))
    for sampler in (None, RandomSampler(whole)):
        own = [int(x) for batch in data.DataLoader(whole, sampler=sampler) for x in batch]
        assert sorted(chain(*pycomm.all_gather_object(own))) == whole
    with pytest.raises(errors.InvalidArgument, match="cannot be divided"):
        data.DataLoader(whole, sampler=SubsetRandomSampler([1]))


@holds("divided among ranks and workers; [an iterable needs `divide=`](data.md#streams)")
def streams(group: Group) -> None:
    def lines() -> Iterator[int]:
        yield from range(9)

    loader = data.DataLoader(lines, transform=float)
    own = [x for batch in loader for x in batch.tolist()]
    assert sorted(chain(*pycomm.all_gather_object(own))) == list(range(9))
    with pytest.raises(errors.InvalidArgument, match="divide"):
        data.DataLoader(Numbers())


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


@holds("[one decoded copy](data.md#one-decoded-copy-per-host), made in the constructor")
def decoded(group: Group) -> None:
    seen: list[int] = []

    class Decoded(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> int:
            seen.append(i)
            return i

    loader = data.DataLoader(Decoded(), shared=True)
    before = len(seen)
    own = [int(x) for batch in loader for x in batch]
    assert len(seen) == before  # nothing is decoded again
    assert sorted(chain(*pycomm.all_gather_object(own))) == list(range(8))


@holds("no sample is repeated")
def slices(group: Group) -> None:
    own = list(data.ShardedSampler(range(257), shuffle=False, order="contiguous"))
    assert own == list(range(257))[129 * group.rank : 129 * (group.rank + 1)]


@holds('`rule="paddle"` averages after other steps')
def rules(group: Group) -> None:
    after = {}
    for rule in ("paddle", "torch"):
        model = nn.Linear(1, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        local = pycomm.LocalSGD(model, sgd, k_steps=4, begin_step=2, rule=rule)
        after[rule] = [step for step in range(3, 12) if averages(local, model, step)]
    assert after == {"paddle": [6, 10], "torch": [3, 7, 11]}


def averages(local: pycomm.LocalSGD, model: nn.Module, until: int) -> bool:
    """Steps until step `until`; whether it ended with an average of parameters."""
    while local.step_count < until:
        local.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        local.step()
    return local.last_sync == until


@holds("any optimizer")
def adam(group: Group) -> None:
    model = nn.Linear(2, 1)
    local = pycomm.LocalSGD(model, torch.optim.Adam(model.parameters()), k_steps=2)
    for _ in range(5):
        model(numbers(group)).sum().backward()
        local.step()
    assert local.last_sync == 5
    both = pycomm.all_gather(parameters_to_vector(model.parameters()).detach())
    assert torch.equal(*both)


@holds("`step(loss)` takes the loss; a loss of 0 raises an error")
def adaptive(group: Group) -> None:
    model = nn.Linear(2, 1)
    local = pycomm.AdaptiveLocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(numbers(group)).square().sum()
    loss.backward()
    local.step(loss)
    with pytest.raises(errors.InvalidArgument, match="loss"):
        for _ in range(4):
            local.step(loss * 0)


@holds("also reads `PADDLE_TRAINER_ID` and related variables")
def paddle(group: Group) -> None:
    where = "127.0.0.1:29500,127.0.0.1:29501"
    found = config.environment(
        {"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": where}
    )
    assert (found.launcher, found.rank, found.size) == ("paddle", 1, 2)


@holds('on by default, 25 MB; `"auto"` is a tenth of all gradients')
def buckets(group: Group) -> None:
    assert inspect.signature(pycomm.DataParallel).parameters["bucket_mb"].default == 25
    assert Limits.of("auto", None, 300_000_000).bytes == 30_000_000


@holds("2 lanes between hosts by default")
def lanes(group: Group) -> None:
    assert CommunicatorPool().count == 1
    hosts = {"transport": "", "host_names": ["a", "b"]}
    apart = run_ranks(2, lambda _: CommunicatorPool().count, **hosts)
    assert apart == [2, 2]


@holds("of this rank; `pycomm.metrics.Accuracy` counts over all ranks")
def accuracies(group: Group) -> None:
    scores, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([group.rank])
    assert metrics.accuracy(scores, labels, 1) == 1 - group.rank
    over_all = metrics.Accuracy(topk=(1,))
    over_all.update(scores, labels)
    assert over_all.compute() == (0.5,)


@holds("MegEngine's names are accepted")
def launcher(group: Group) -> None:
    named = pycomm.launcher(n_gpus=1, world_size=2, master_ip="host0", port=29400)(launcher)
    own = pycomm.launcher(nproc=1, size=2, master_addr="host0", master_port=29400)(launcher)
    assert named._options == own._options


@holds("one call per dtype")
def broadcast_list(group: Group) -> None:
    xs = [torch.full((3,), group.rank, dtype=getattr(torch, d)) for d in KINDS]
    before = group.stats().calls
    pycomm.bcast_list_(xs)
    assert group.stats().calls - before == len(set(KINDS))
    assert all(x.tolist() == [0] * 3 for x in xs)


@holds("no client object; plain values, `torch.Size` and NumPy arrays")
def user_keys(group: Group) -> None:
    if group.rank == 0:
        pycomm.user_set("shape", torch.ones(2, 3).shape)
        pycomm.user_set("array", np.arange(3))
    assert pycomm.user_get("shape") == (2, 3)
    assert pycomm.user_get("array").tolist() == [0, 1, 2]
    with pytest.raises(errors.InvalidArgument, match="not a plain value"):
        pycomm.user_set("dtype", np.dtype("f4"))


@holds(
    "`dest_rank=` is accepted; CUDA tensors pass through host memory",
    "shape and dtype are sent, and checked if given; `src_rank=` is accepted",
)
def features(group: Group) -> None:
    for shape in (None, (2,), (3,)):
        if group.rank == 0:
            pycomm.remote_send(torch.ones(2), dest_rank=1)
        elif shape == (3,):
            with pytest.raises(errors.Mismatch):
                pycomm.remote_recv(src_rank=0, shape=shape, dtype=torch.float32)
        else:
            got = pycomm.remote_recv(src_rank=0, shape=shape)
            assert (got.shape, got.dtype) == ((2,), torch.float32)


@holds("`DataParallel` includes it")
def equal_replicas(group: Group) -> None:
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.fill_(group.rank + 5.0)
    pycomm.DataParallel(net)
    assert net.weight.unique().tolist() == [5.0]


def test_each_remark_has_a_check() -> None:
    known = [*NO_CLAIMS, *HELD_BY, *CHECKS]
    assert len(known) == len(set(known))
    assert set(known) == REMARKS
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {name for names in HELD_BY.values() for name in names}
    assert named - set(re.findall(r"def (test_\w+)", sources)) == set()


@pytest.mark.parametrize("check", sorted(set(CHECKS.values()), key=lambda c: c.__name__))
def test_remark_is_true(check: Check) -> None:
    run_ranks(2, check)


# Names that occur in pages without their module, and objects by the names that the pages give them.
MODULES = (pycomm, data, metrics, kernels, pycomm.testing, data.ShardedSampler)
OBJECTS = {
    "pycomm": pycomm,
    "model": pycomm.DataParallel,
    "dgc": pycomm.DGC,
    "local": pycomm.LocalSGD,
    "group": Group,
    "torch_backend": torch_backend,
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_OUR_LOADER = inspect.signature(data.DataLoader).parameters
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]*\w\([^`\n]*)`")


def texts() -> Iterator[tuple[str, str]]:
    """Each page, and code in it that is no block. In the tables of docs/migration.md only ours."""
    for page in PAGES:
        text = FENCED.sub("", page.read_text())
        if page.name == "migration.md":
            text = "\n".join(f"{ours} {differences}" for _, ours, differences in MIGRATION)
        for code in CODE.findall(text):
            yield page.name, code


def calls(code: str) -> list[ast.Call]:
    """The calls in a piece of code, which may be a statement without its end."""
    whole = re.sub(r"=(?=[,)])", "=None", code.lstrip("@")).removeprefix("with ").rstrip(":")
    try:
        tree = ast.parse(whole)
    except SyntaxError:  # words, or a part of a call
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def target(function: ast.expr) -> Any:
    """What a call in a page calls; None if it is not ours, or is C++, which shows no signature."""
    first, *rest = ast.unparse(function).split(".")
    found = OBJECTS.get(first)
    if found is None:
        found = next((getattr(m, first) for m in MODULES if hasattr(m, first)), None)
    for name in rest:
        found = getattr(found, name, None)
    ours = getattr(found, "__module__", "").startswith("pycomm")
    return found if ours and not inspect.isbuiltin(found) else None


def complaint(call: ast.Call) -> str:
    """What is wrong with the arguments of a call, or ""."""
    function = target(call.func)
    if function is None:
        return ""
    method = inspect.isfunction(function) and "." in function.__qualname__
    positional = [a for a in call.args if not isinstance(a, ast.Constant) or a.value is not ...]
    also = inspect.getclosurevars(function).nonlocals["others"] if takes_aliases(function) else {}
    named = {also.get(k.arg, k.arg): None for k in call.keywords if k.arg}
    try:
        inspect.signature(function).bind_partial(*([None] * method), *positional, **named)
        if function is data.DataLoader:  # which passes the rest to torch's
            theirs = {name: None for name in named if name not in OF_OUR_LOADER}
            inspect.signature(torch.utils.data.DataLoader).bind_partial(*positional, **theirs)
    except TypeError as error:  # the arguments do not fit
        return str(error)
    return ""


def takes_aliases(function: Any) -> bool:
    """Whether it accepts arguments under the names of other libraries, too."""
    return inspect.isfunction(function) and function.__code__ is also_named()(len).__code__


def test_calls_in_pages_fit_the_signatures() -> None:
    found = [(page, code, call) for page, code in texts() for call in calls(code)]
    ours = [code for _, code, call in found if target(call.func) is not None]
    assert len(ours) > 80
    wrong = {(page, code): text for page, code, call in found if (text := complaint(call))}
    assert wrong == {}


@pytest.mark.parametrize(
    "code",
    ["DataLoader(data, size=2)", "pycomm.remote_recv(0, form=)", "model.shrink(by=1)", "rank(0)"],
)
def test_a_wrong_call_is_found(code: str) -> None:
    assert complaint(calls(code)[0])
