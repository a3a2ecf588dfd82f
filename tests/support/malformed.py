"""Malformed calls: one parameter of a valid call has a wrong value. valid_calls.py has the valid
calls.

Each call raises a pycomm.errors.Error or works. After an error no array changed, and the next call
works. The values are of wrong types, shapes, dtypes, devices and sizes.
"""

import contextlib
import importlib
import inspect
import math
import types
from array import array
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch

import pycomm
from pycomm import Group, errors


class Raises:
    """An object whose truth, number and text raise."""

    def __bool__(self) -> bool:
        raise ValueError("no truth")

    def __index__(self) -> int:
        raise ValueError("no number")

    def __repr__(self) -> str:
        raise ValueError("no text")


class Elsewhere:
    """An array of another library, in the memory of a device that pycomm does not know."""

    shape, dtype, ndim = (3,), np.dtype(np.float32), 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return 8, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("on another device")


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
    "beyond floats": lambda: 10**400,
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
    "NumPy's nan": lambda: np.float32(math.nan),
    "ratio": lambda: Fraction(7, 3),
    "complex number": lambda: 1j,
    "array of Python": lambda: array("f", [1.0, 2.0, 3.0]),
    "masked": lambda: np.ma.masked_array(np.zeros(3, np.float32), [0, 1, 0]),
    "elsewhere": Elsewhere,
}


Valid = Callable[[Group], dict[str, Any]]
LOADED = {"state", "saved", "state_dict"}  # parameters of load_state_dict()
ROOTED = ("reduce", "broadcast", "gather", "scatter")
CALLED = ("build", "step", "fn", "function", "closure", "convert", "transform", "map_location")
# Errors of another library, as the reference says.
BY_ANOTHER = (("save", "obj"),)  # torch.save's, on rank 0
STARTS_A_PROCESS = ("testing.run_ranks", "processes")  # with True: test_malformed_calls.py has it
# Without a valid call: one rank has no peer, and no group of the tests is elastic or of torch.
ONLY_WRONG = (
    *("send", "recv", "remote_send", "remote_recv", "join", "dgc_hook", "quantize_hook"),
    *("quantize_hsdp", "torch_backend.stats", "torch_backend.create", "torch_backend.merge"),
    "torch_backend.shrink",
)
ONLY_ELASTIC = ("replace", "grow")


def function_of(name: str) -> Callable[..., Any]:
    """The function `pycomm.{name}`, also of a module that pycomm does not import itself. Words
    after the name say what is special about the arguments."""
    found: Any = pycomm
    for part in name.partition(" ")[0].split("."):
        if isinstance(found, types.ModuleType) and not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


def called(name: str, arguments: dict[str, Any]) -> Any:
    """Calls a function. "self" is the object of a method; "*" has further positional arguments."""
    named = dict(arguments)
    function = function_of(name)
    if "self" in named:
        function = getattr(named.pop("self"), name.partition(" ")[0].rpartition(".")[2])
    before = list(named).index("*") if "*" in named else 0
    positional = [named.pop(one) for one in list(named)[:before]]
    result = function(*positional, *named.pop("*", ()), **named)
    if isinstance(result, pycomm.Work):
        result.wait()
    if name in ("init", "join"):
        pycomm.shutdown()
    if isinstance(result, contextlib.AbstractContextManager) and name.endswith(".join"):
        with result:
            pass
    if inspect.isgenerator(result):  # checks its arguments when it is read
        next(result, None)
    return result


def arrays_in(arguments: dict[str, Any]) -> list[Any]:
    lists = [v for v in arguments.values() if isinstance(v, list)]
    flat = [*arguments.values(), *(one for several in lists for one in several)]
    return [one for one in flat if type(one) is np.ndarray and one.dtype.kind in "fiu"]


def defaults_of(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The parameters with a default that a valid call leaves out; none if the name has words."""
    if " " in name:
        return {}
    function = function_of(name)
    if "self" in given:
        function = getattr(given["self"], name.rpartition(".")[2])
    known = [p for p in inspect.signature(function).parameters.values() if p.default is not p.empty]
    left = [p for p in known if p.name not in given and p.kind is not p.POSITIONAL_ONLY]
    return {p.name: p.default for p in left}


def wrong_calls(name: str, valid: Valid, group: Group) -> Iterator[tuple[str, dict[str, Any]]]:
    given = valid(group)
    for parameter, usual in {**given, **defaults_of(name, given)}.items():
        if parameter == "self" or (name, parameter) in (*BY_ANOTHER, STARTS_A_PROCESS):
            continue
        if group is not None and group.size > 1 and name in ROOTED and parameter in ("x", "out"):
            continue  # the root may accept an array that the others refuse
        for title, make in VALUES.items():
            if parameter in CALLED and title in ("type", "function"):
                continue  # they can be called: what they raise is an error of the user's function
            value = (make(),) if parameter == "*" else make()
            yield f"{name}({parameter}={title})", {**valid(group), parameter: value}
            for field in fields_of(usual):
                given = valid(group)
                given[parameter] = replaced(given[parameter], field, make())
                yield f"{name}({parameter}.{field}={title})", given


def fields_of(value: Any) -> list[str]:
    """The names of the parts of a state or of a packet, each of which may be wrong."""
    names = value if isinstance(value, dict) else getattr(value, "_fields", ())
    return list(names)


def replaced(value: Any, field: str, by: Any) -> Any:
    if isinstance(value, dict):
        return {**value, field: by}
    return value._replace(**{field: by})


def content(arguments: dict[str, Any]) -> list[Any]:
    """What an error must not change: the arrays, and the state of an object that loads one."""
    found = [one.tobytes() for one in arrays_in(arguments)]
    if "self" in arguments and LOADED & arguments.keys():
        found.append(as_plain(arguments["self"].state_dict()))
    return found


def as_plain(state: Any) -> Any:
    """The state with bytes in place of arrays, so that it can be compared."""
    if isinstance(state, dict):
        return {key: as_plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [as_plain(value) for value in state]
    return np.asarray(state).tobytes() if isinstance(state, (np.ndarray, torch.Tensor)) else state


def outcome(name: str, arguments: dict[str, Any]) -> str:
    """What is wrong with a call: an error that is not ours, or an array that changed."""
    before = content(arguments)
    try:
        called(name, arguments)
    except errors.InternalError as error:  # a fault of pycomm
        return f"InternalError: {error}"
    except errors.Error:  # as promised
        return "" if before == content(arguments) else "an array changed"
    except OSError as error:  # of a file: "on rank 0 the original error"
        return "" if name in ("save", "load") else f"{type(error).__name__}: {error!s:.100}"
    except Exception as error:  # of any kind: this is what the test looks for
        return f"{type(error).__name__}: {error!s:.100}"
    return ""


def failures(group: Group | None, calls: dict[str, Valid]) -> list[str]:
    """The malformed calls that fail; without a group those of a process.

    After those of a function its valid call works, and so does the group.
    """
    wrong = []
    for name, valid in calls.items():
        for title, arguments in wrong_calls(name, valid, group):
            if why := outcome(name, arguments):
                wrong.append(f"{title}: {why}")
        if name not in ONLY_WRONG and not name.endswith(ONLY_ELASTIC):
            called(name, valid(group))
        if group is None:
            continue
        total = np.full(2, group.rank + 1.0)
        assert pycomm.all_reduce(total, group=group)[0] == group.size * (group.size + 1) / 2, name
    return wrong
