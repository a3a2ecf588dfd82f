"""Malformed calls of the functions in docs/reference: one parameter has a wrong value.

Each call raises a pycomm.errors.Error or works. After an error no array changed, and the next call
works. The values are of wrong types, shapes, dtypes, devices and sizes; the names are read from the
reference, and a name without a valid call here is in LEFT, with the reason.
"""

import copy
import functools
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from paths import ROOT

import pycomm
from pycomm import Group, errors
from pycomm.testing import run_ranks

torch = pytest.importorskip("torch")

Valid = Callable[[Group], dict[str, Any]]


class Raises:
    """An object whose truth, number and text raise."""

    def __bool__(self) -> bool:
        raise ValueError("no truth")

    def __index__(self) -> int:
        raise ValueError("no number")

    def __repr__(self) -> str:
        raise ValueError("no text")


def read_only() -> Any:
    x = np.zeros(3, np.float32)
    x.flags.writeable = False
    return x


def resized() -> Any:
    x = torch.zeros(2000)
    x.untyped_storage().resize_(0)
    return x


VALUES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "text": lambda: "x",
    "no text": lambda: "",
    "half a character": lambda: "\ud800",
    "bytes": lambda: b"xyz",
    "fraction": lambda: 1.5,
    "nan": lambda: math.nan,
    "infinite": lambda: math.inf,
    "negative": lambda: -7,
    "minus one": lambda: -1,
    "zero": lambda: 0,
    "large": lambda: 2**40,
    "huge": lambda: -(2**70),
    "empty list": lambda: [],
    "list": lambda: [1, "a"],
    "nested": lambda: [[np.zeros(2)], [np.zeros(2)]],
    "empty tuple": lambda: (),
    "tuple": lambda: (2**20, "float32", 4, None),
    "dictionary": lambda: {"a": 1},
    "type": lambda: int,
    "module": lambda: math,
    "function": lambda: len,
    "object": object,
    "raises": Raises,
    "scalar array": lambda: np.array(1.0),
    "integers": lambda: np.array([1, 2]),
    "empty array": lambda: np.zeros(0, np.float32),
    "matrix": lambda: np.zeros((5, 7), np.float64),
    "complex": lambda: np.zeros(3, complex),
    "texts": lambda: np.array(["a", "b"]),
    "objects": lambda: np.array([None, 1]),
    "times": lambda: np.zeros(2, "datetime64[s]"),
    "read-only": read_only,
    "tensor": lambda: torch.ones(5, dtype=torch.int64),
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "needs gradients": lambda: torch.ones(3, requires_grad=True) * 2,
    "complex tensor": lambda: torch.zeros(3, dtype=torch.complex64),
    "without storage": resized,
    "expanded": lambda: torch.zeros(1).expand(3),
    "torch's dtype": lambda: torch.float16,
}


def x(n: int = 3) -> Any:
    return np.arange(n, dtype=np.float32)


def rows(group: Group) -> Any:
    return np.zeros((group.size, 3), np.float32)


def common(group: Group, **more: Any) -> dict[str, Any]:
    return {**more, "algorithm": None, "group": group, "async_op": False, "timeout_s": 20.0}


def message(group: Group, peer: str) -> dict[str, Any]:
    return {"x": x(), peer: 1 - group.rank, "tag": 1, "group": group, "timeout_s": 20.0}


def stored(group: Group) -> dict[str, Any]:
    pycomm.user_set("k", 1, group=group)
    return {"key": "k", "timeout_s": 0.01, "group": group}


# The arguments of a valid call. On two ranks both ranks make it.
VALID: dict[str, Valid] = {
    "all_reduce": lambda g: common(g, x=x(), op="sum", compression=None, state=None),
    "reduce": lambda g: common(g, x=x(), dst=0, op="sum"),
    "broadcast": lambda g: common(g, x=x(), src=0),
    "all_gather": lambda g: common(g, x=x(), out=rows(g)),
    "all_gather_v": lambda g: common(g, x=x(), out=[x() for _ in range(g.size)]),
    "gather": lambda g: common(g, x=x(), dst=0, out=rows(g) if g.size == 1 else None),
    "reduce_scatter": lambda g: common(g, x=rows(g), op="sum", out=x()),
    "scatter": lambda g: common(g, x=rows(g), src=0, out=x()),
    "all_to_all": lambda g: common(g, x=rows(g), out=rows(g)),
    "barrier": lambda g: {"group": g, "async_op": False, "timeout_s": 20.0},
    "bcast_list_": lambda g: {"tensors": [torch.zeros(3)], "src": 0, "group": g},
    "all_gather_object": lambda g: {"value": 1, "group": g},
    "user_set": lambda g: {"key": "k", "value": 1, "group": g},
    "functional.all_reduce": lambda g: {"x": torch.ones(3), "op": "sum", "group": g},
    "functional.all_gather": lambda g: {"x": torch.ones(3), "group": g},
    "metrics.accuracy": lambda _: {"scores": torch.zeros(4, 3), "labels": torch.zeros(4).long()},
    "metrics.Mean": lambda g: {"every": 1, "group": g},
    "metrics.Accuracy": lambda g: {"topk": (1,), "every": 1, "group": g},
    "data.share": lambda g: {"array": x(), "group": g},
    "data.ShardedSampler": lambda g: {
        **{"data": [1, 2, 3], "shuffle": True, "seed": 0, "order": "strided", "pad": False},
        **{"drop_last": False, "rank": g.rank, "size": g.size},
    },
    "data.InfiniteSampler": lambda _: {"sampler": pycomm.data.ShardedSampler([1], rank=0, size=1)},
    "data.Prefetcher": lambda _: {"loader": [torch.ones(2)], "device": "cpu", "depth": 2},
    "make_allreduce_cb": lambda g: {"op": "sum", "group": g},
    "testing.status": lambda g: {"group": g},
    "Quantize": lambda _: {"bits": 3, "down_bits": 8, "error_feedback": True, "exchange": "auto"},
    "TopK": lambda _: {"ratio": None, "density": 0.1, "group": 16, "value_dtype": "1bit"},
}
ALONE: dict[str, Valid] = {  # calls of one rank, or with a file of its own
    "send": lambda g: message(g, "dst"),
    "recv": lambda g: message(g, "src"),
    "empty": lambda _: {"shape": 3, "dtype": "float32", "shared": True},
    "set_num_threads": lambda _: {"n": 1},
    "remote_send": lambda g: {"x": torch.ones(3), "dst": 1, "group": g},
    "remote_recv": lambda g: {"src": 1, "shape": (3,), "dtype": torch.float32, "group": g},
    "user_get": stored,
    "user_pop": stored,
    "kernels.topk": lambda _: {"x": x(100), "k": 3},
    "kernels.threshold": lambda _: {"x": x(100), "k": 3},
    "kernels.norm": lambda _: {"x": x(100)},
    "kernels.clip_": lambda _: {"x": x(100), "limit": 1.0},
    "kernels.cast": lambda _: {"x": x(100), "dtype": "float16"},
    "kernels.reduce_": lambda _: {"out": x(), "xs": [x(), x()], "op": "sum"},
    "kernels.scatter_add": lambda _: {
        **{"out": x(100), "indices": np.array([1, 5], np.int32), "values": x(2), "scale": 1.0}
    },
    "kernels.encode": lambda _: {
        **{"indices": np.array([1, 5], np.int32), "values": x(2), "count": 100},
        "value_dtype": "float32",
    },
    "kernels.quantized_bytes": lambda _: {"count": 100, "bits": 3},
    "kernels.packet_bytes": lambda _: {"k": 3, "count": 100},
}


ROOTED = ("reduce", "broadcast", "gather", "scatter")


def function_of(name: str) -> Callable[..., Any]:
    found: Any = functools.reduce(getattr, name.split("."), pycomm)
    return found


def arrays_in(arguments: dict[str, Any]) -> list[Any]:
    lists = [v for v in arguments.values() if isinstance(v, list)]
    flat = [*arguments.values(), *(one for several in lists for one in several)]
    return [one for one in flat if isinstance(one, np.ndarray) or type(one) is torch.Tensor]


def wrong_calls(name: str, valid: Valid, group: Group) -> Iterator[tuple[str, dict[str, Any]]]:
    for parameter in valid(group):
        if group.size > 1 and name in ROOTED and parameter in ("x", "out"):
            continue  # the root may accept an array that the others refuse
        for title, make in VALUES.items():
            yield f"{name}({parameter}={title})", {**valid(group), parameter: make()}


def outcome(name: str, arguments: dict[str, Any]) -> str:
    """What is wrong with a call: an error that is not ours, or an array that changed."""
    before = [copy.deepcopy(one) for one in arrays_in(arguments) if not one_of_values(one)]
    try:
        result = function_of(name)(**arguments)
        if isinstance(result, pycomm.Work):
            result.wait()
    except errors.InternalError as error:  # a fault of pycomm
        return f"InternalError: {error}"
    except errors.Error:  # as promised
        kept = [one for one in arrays_in(arguments) if not one_of_values(one)]
        changed = not all((a == b).all() for a, b in zip(before, kept, strict=True))
        return "an array changed" if changed else ""
    except Exception as error:  # of any kind: this is what the test looks for
        return f"{type(error).__name__}: {error!s:.100}"
    return ""


def one_of_values(x: Any) -> bool:
    """Whether the array is a wrong value, which may have no values to compare."""
    return not isinstance(x, np.ndarray) or x.dtype.kind not in "fi"


# Names of the reference without a valid call here, and why.
LEFT = {
    "of the whole process": "init join shutdown is_initialized rank size local_rank local_size "
    "host_count testing.run_ranks testing.FaultPlan launcher launch.Launcher save load print0 plan "
    "tuning.planner.Expected algorithms",
    "read in worker processes": "data.ScatterLoader data.DataLoader",
    "results, which programs do not make": "Group Work QuantizeState reference.Step "
    "reference.Update elastic.ShrinkResult elastic.Microbatch",
    "checked by torch, or options of training": "DataParallel SyncBatchNorm DGC dgc_hook "
    "QuantizedGradients quantize_hook quantize_hsdp LocalSGD AdaptiveLocalSGD StaticLossScaler "
    "elastic.sync_state elastic.ShardedTraining elastic.Microbatches elastic.manual_seed "
    "elastic.RandomState",
}


def test_every_name_of_the_reference_is_called_or_left() -> None:
    texts = [page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")]
    names = set(re.findall(r"auto(?:function|class):: pycomm\.([\w.]+)", "\n".join(texts)))
    apart = ("kernels.", "torch_backend.", "errors.")  # the first have tests of their own, too
    names = {name for name in names if not name.startswith(apart)}
    called = {name for name in {*VALID, *ALONE} if not name.startswith(apart)}
    assert names == called | set(" ".join(LEFT.values()).split())


def failures(group: Group, calls: dict[str, Valid]) -> list[str]:
    """The malformed calls of the calls that fail, and valid ones that raise."""
    wrong = []
    for name, valid in calls.items():
        for title, arguments in wrong_calls(name, valid, group):
            if why := outcome(name, arguments):
                wrong.append(f"{title}: {why}")
        if name not in ALONE:
            function_of(name)(**valid(group))  # works after all of these
        total = np.full(2, group.rank + 1.0)
        assert pycomm.all_reduce(total, group=group)[0] == group.size * (group.size + 1) / 2, name
    return wrong


@pytest.mark.filterwarnings("ignore")
def test_malformed_calls_of_one_rank() -> None:
    assert run_ranks(1, failures, {**VALID, **ALONE}) == [[]]
    pycomm.set_num_threads(len(os.sched_getaffinity(0)))


@pytest.mark.filterwarnings("ignore")
def test_malformed_calls_of_two_ranks() -> None:
    assert run_ranks(2, failures, VALID) == [[], []]


def test_all_gather_with_the_arguments_of_torch_names_its_own() -> None:
    def program(group: Group) -> None:
        with pytest.raises(
            errors.InvalidArgument, match=r"got list.* out = pycomm.all_gather\(x\)"
        ):
            pycomm.all_gather([x(), x()], x(), group=group)

    run_ranks(1, program)
