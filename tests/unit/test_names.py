"""Names of other libraries: the hints of AttributeErrors, and arguments."""

import importlib.metadata
import re

import numpy as np
import pytest

import pycomm
from pycomm import errors
from pycomm._arguments import also_named
from pycomm._names import EQUIVALENTS
from pycomm.testing import run_ranks

TEXTS = {names: text for texts in EQUIVALENTS.values() for names, text in texts.items()}
THEIRS = " ".join(TEXTS).split()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "get_rank",
            "PyTorch DDP's get_rank(), get_world_size() is pycomm.rank(), pycomm.size() here",
        ),
        ("WORLD", "MegEngine's dist.WORLD is group=None here"),
        ("fleet", "Paddle's fleet.distributed_model(net) is pycomm.DataParallel(net) here"),
        ("allreduce", 'is pycomm.all_reduce(x, op="avg") here'),
    ],
)
def test_the_name_of_another_library_gives_ours(name: str, text: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(pycomm, name)
    assert str(raised.value).startswith(f"module 'pycomm' has no attribute '{name}': ")
    assert text in str(raised.value)


def test_an_unknown_name_has_no_hint() -> None:
    with pytest.raises(AttributeError, match=r"^module 'pycomm' has no attribute 'no_such_name'$"):
        pycomm.no_such_name  # noqa: B018 - the access is what fails


def test_each_name_is_theirs_alone_and_ours_exist() -> None:
    assert [name for name in THEIRS if name in pycomm.__all__] == []
    assert len(THEIRS) == len(set(THEIRS)) > 40
    ours = {name for text in TEXTS.values() for name in re.findall(r"pycomm\.(\w+)", text)}
    assert len(ours) > 15
    assert [name for name in sorted(ours) if not hasattr(pycomm, name)] == []


@pytest.mark.parametrize(
    ("name", "ours"),
    [("allreduce_scatter", "reduce_scatter"), ("brodcast", "broadcast"), ("LocalSgd", "LocalSGD")],
)
def test_a_typing_error_gives_the_nearest_name(name: str, ours: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"no attribute '{name}': did you mean pycomm.{ours}\?$"
    ):
        getattr(pycomm, name)


@also_named(count="n", colour="it has none")
def repeated(text: str, n: int = 1) -> str:
    return text * n


def test_arguments_are_renamed_or_explained() -> None:
    assert repeated("a", count=2) == repeated("a", n=2) == "aa"  # type: ignore[call-arg]  # an alias
    with pytest.raises(TypeError, match=r"^repeated\(\) has no argument 'colour': it has none$"):
        repeated("a", colour=1)  # type: ignore[call-arg]  # that is what fails
    with pytest.raises(TypeError, match="'count' and 'n', which are the same"):
        repeated("a", n=1, count=2)  # type: ignore[call-arg]  # that is what fails
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        repeated("a", other=1)  # type: ignore[call-arg]  # that is what fails


def test_the_version_is_that_of_the_distribution() -> None:
    assert pycomm.__version__ == importlib.metadata.version("pycomm-collectives")


@pytest.mark.parametrize(
    ("op", "same"),
    [
        ("mean", "avg"),
        ("prod", "product"),
        ("SUM", "sum"),
        ("BXOR", "bxor"),
        ("PRODUCT", "product"),
    ],
)
def test_ops_have_the_names_of_numpy_and_torch(op: str, same: str) -> None:
    given = op
    if op.isupper():
        given = getattr(pytest.importorskip("torch.distributed").ReduceOp, op)
    xs = [np.array([3.0, 5.0]), np.array([4.0, 6.0])]
    if same == "bxor":
        xs = [x.astype(np.int64) for x in xs]
    wanted = pycomm.kernels.reduce_(xs[0].copy(), xs, same)
    assert np.array_equal(pycomm.kernels.reduce_(xs[0].copy(), xs, given), wanted)
    run_ranks(1, lambda group: pycomm.all_reduce(xs[0], given, group=group))


def test_an_unknown_op_lists_the_valid_ones() -> None:
    torch = pytest.importorskip("torch")
    for op in ("PREMUL", "Sum", None, 3, torch.distributed.ReduceOp.PREMUL_SUM):
        with pytest.raises(errors.InvalidArgument, match=r" op.* one of: sum"):
            pycomm.kernels.reduce_(np.ones(1), [np.ones(1)], op)
