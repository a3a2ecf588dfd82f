"""What rows of the pages say is so: calls fit the signatures, and each remark of docs/migration.md
on a difference is checked here, with two ranks, or by a named test.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from paths import ROOT

import pycomm
from pycomm import Group, data, kernels, metrics, torch_backend
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
    "see [rank failures](elastic.md#training)",
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
    "no import of torch needed": (
        "test_package_works_with_its_requirements_alone",
        "test_importing_pycomm_does_not_import_torch",
    ),
    "`bucket_cap_mb` is accepted; move the module to its device first": ("test_bad_arguments",),
    "a group has `group.rank`, `group.size`": (
        "test_package_works_with_its_requirements_alone",
        "test_split",
    ),
    "the default group": ("test_package_works_with_its_requirements_alone", "test_split"),
    "returns a `Work`": ("test_async_calls_end_in_order_and_keep_their_arrays",),
    "returns `x`; takes torch's `ReduceOp` too": (
        "test_ops_have_the_names_of_numpy_and_torch",
        "test_any_strides_give_correct_results_and_write_nothing_else",
    ),
    "in place": (
        "test_ops_have_the_names_of_numpy_and_torch",
        "test_any_strides_give_correct_results_and_write_nothing_else",
    ),
    "plain values only, no pickle": (
        "test_values_of_all_ranks",
        "test_unsupported_value_is_reported_on_every_rank",
    ),
    "collective over the parent; returns None with `color=None`": ("test_split",),
    "repeats samples only with `pad=True`; counts epochs": (
        "test_padding_and_dropping",
        "test_epochs_differ_and_repeat",
    ),
    "divides torch's sequential and random samplers; others must know the ranks": (
        "test_a_given_sampler_is_divided",
        "test_a_sampler_that_every_rank_would_read_whole_is_refused",
    ),
    "divided among ranks and workers; [an iterable needs `divide=`](data.md#streams)": (
        "test_each_sample_is_read_once",
        "test_an_iterable_that_may_divide_itself_needs_an_answer",
    ),
    "[one decoded copy](data.md#one-decoded-copy-per-host), made in the constructor": (
        "test_ranks_decode_a_share_each_into_one_copy",
    ),
    "no sample is repeated": ("test_shards_partition_the_data",),
    '`rule="paddle"` averages after other steps': ("test_the_steps_that_average",),
    "any optimizer": ("test_adam_is_synchronous_until_begin_step",),
    "`step(loss)` takes the loss; a loss of 0 raises an error": (
        "test_adaptive_follows_rate_and_loss",
        "test_adaptive_without_an_interval_raises_everywhere",
    ),
    "also reads `PADDLE_TRAINER_ID` and related variables": (
        "test_variables_of_each_launcher_are_read",
    ),
    "of this rank; `pycomm.metrics.Accuracy` counts over all ranks": (
        "test_the_value_is_that_of_one_process",
        "test_accuracy_of_a_batch_as_in_paddle",
    ),
    "MegEngine's names are accepted": ("test_torch_group_uses_the_same_engine",),
    "no client object; plain values, `torch.Size` and NumPy arrays": (
        "test_a_shape_of_torch_becomes_a_tuple",
        "test_arrays_round_trip",
        "test_invalid_keys_and_values_are_rejected",
    ),
    "`dest_rank=` is accepted; CUDA tensors pass through host memory": (
        "test_shape_and_dtype_are_sent",
        "test_megengine_names_and_expectations",
    ),
    "shape and dtype are sent, and checked if given; `src_rank=` is accepted": (
        "test_shape_and_dtype_are_sent",
        "test_megengine_names_and_expectations",
    ),
    "`DataParallel` includes it": ("test_equals_one_process_on_all_batches",),
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


@holds("one call per dtype")
def broadcast_list(group: Group) -> None:
    xs = [torch.full((3,), group.rank, dtype=getattr(torch, d)) for d in KINDS]
    before = group.stats().calls
    pycomm.bcast_list_(xs)
    assert group.stats().calls - before == len(set(KINDS))
    assert all(x.tolist() == [0] * 3 for x in xs)


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
