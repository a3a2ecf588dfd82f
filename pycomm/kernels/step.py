"""The DGC step, its way back, and momentum factor masking (arXiv 1712.01887).

csrc/kernels/device_kernels.h has the formulas, pycomm.reference their meaning in NumPy. Called by
users, as pycomm.kernels, and by the training layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycomm import arrays
from pycomm.arrays import Located
from pycomm.errors import InvalidArgument
from pycomm.kernels import devices, inputs

REAL = ("float32", "float64")


def dgc_step(  # noqa: PLR0913 - all but the first four by name
    grad: Any,
    u: Any,
    v: Any,
    k: int | Sequence[int],
    *,
    momentum: float,
    weight: Any = None,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    masking: bool = True,
    scale: float | Any = 1.0,
    found_inf: Any = None,
    indices: Any = None,
    values: Any = None,
    u_values: Any = None,
    workspace: Any = None,
    together: bool = False,
) -> tuple[Any, Any]:
    """One step of deep gradient compression: u and v take the gradient in, and k elements go out.

    For each element `x = fma(weight_decay, weight, scale * grad); u = fma(momentum, u, x);
    v = v + u` (Nesterov: `t = u + x; u = momentum * t; v = v + (u + x)`). The k largest |v| (ties
    to the lower index, NaN above infinity above all else) are given, and v, and with `masking` u,
    become 0 there; u also where the value is not finite.

    Lists of arrays are taken as well. With a list of k each array has its own k, and lists come
    back; with one k that many are chosen from all of them, laid end to end.

    Args:
        grad: gradients, float16, bfloat16, float32, or float64 where u and v are. Read only.
        u: velocity, float32 or float64, of the gradient's shape (or flat). In place.
        v: what is not sent yet, as u. In place.
        k: how many to choose, 0..count.
        momentum: m in the formula.
        weight: parameters for the decay, of the dtype of the gradient or of u; read only, and not
            at all where `weight_decay` is 0.
        weight_decay: lambda in the formula (L2).
        nesterov: which of the two formulas.
        masking: momentum factor masking.
        scale: the factor of the gradient, one number; or an array on the device, of the dtype of
            u, with one for each array of the lists.
        found_inf: float32 array of one number on the device. Where it is not 0 nothing changes,
            and what is given is indices 0..k-1 and values 0.
        indices, values: buffers for the result, int32 [k] and [k] of the dtype of u.
        u_values: a buffer, or a list of them, for u at the indices before masking: what
            `dgc_rollback` needs.
        workspace: what `dgc_workspace` made for these arrays, kept from step to step; without it
            each step finds its own way and takes longer. It never changes a result.
        together: with a list of k, give one packet for all: indices count through all arrays, laid
            end to end, and the buffers have sum(k) elements.

    Returns:
        (indices int32 [k], ascending, values [k]), or a list of each.

    Raises:
        InvalidArgument, Unsupported: before anything changes.
    """
    numbers = inputs.finite(momentum, "momentum"), inputs.finite(weight_decay, "weight_decay")
    decay = numbers[1] != 0
    if decay and weight is None:
        raise InvalidArgument("weight_decay without weight: pass the parameters")
    others = {"grad": grad, **({"weight": weight} if decay else {})}
    step = _Step.of(u, v, k, others, together=together)
    chosen = _Chosen.of(step, indices, values, u_values)
    flag = _flag(found_inf)
    factor, factors = _scale(scale, step)
    tables = step.tables(chosen)
    module = devices.module(step.first.device)
    room = inputs.workspace(workspace, step.first, module.dgc_workspace_bytes(*tables), zeros=True)
    read = [*step.read, *flag, *factors]
    written = [*step.u, *step.v, *chosen.located, room]
    inputs.same_device([*written, *read], "dgc_step")
    inputs.apart(written, read, "dgc_step")
    module.dgc_step(
        *tables,
        step.dtype_of("grad"),
        step.dtype_of("weight" if decay else "grad"),
        *numbers,
        factor,
        factors[0].pointer if factors else 0,
        bool(nesterov),
        bool(masking),
        flag[0].pointer if flag else 0,
        (room.pointer, room.nbytes),
        *devices.queue(step.first.device, step.first.array),
    )
    return chosen.result()


def dgc_workspace(u: Any, v: Any, k: int | Sequence[int]) -> Any:
    """A new workspace for dgc_step with these arrays and k; uint8, on their device."""
    step = _Step.of(u, v, k, {})
    inputs.same_device([*step.u, *step.v], "dgc_workspace")
    module = devices.module(step.first.device)
    nbytes = module.dgc_workspace_bytes(*step.tables(None))
    return arrays.new(step.first, (nbytes,), "uint8", zeros=True)


def dgc_rollback(
    u: Any, v: Any, indices: Any, values: Any, u_values: Any, *, found_inf: Any = None
) -> None:
    """Undoes the sending of a dgc_step: u and v are what they were before the choice, bit for bit.

    A step that is rolled back is a step that sent nothing: the gradient stays in u and v.

    Args:
        u, v: as given to dgc_step, or lists. In place.
        indices, values, u_values: what that step gave, or lists; one of each where indices count
            through all arrays.
        found_inf: what the step was given, so that a step that did nothing is not undone.

    Raises:
        InvalidArgument, Unsupported: before anything changes.
    """
    several = isinstance(indices, list | tuple)
    k = [len(x) for x in indices] if several else len(indices)
    step = _Step.of(u, v, k, {})
    chosen = _Chosen.of(step, indices, values, u_values, write=False)
    flag = _flag(found_inf)
    written = [*step.u, *step.v]
    inputs.same_device([*written, *chosen.located, *flag], "dgc_rollback")
    inputs.apart(written, [*chosen.located, *flag], "dgc_rollback")
    devices.module(step.first.device).dgc_rollback(
        *step.tables(chosen),
        flag[0].pointer if flag else 0,
        *devices.queue(step.first.device, step.first.array),
    )


def momentum_mask(u: Any, v: Any, indices: Any) -> None:
    """u[indices] = 0 and v[indices] = 0, in place.

    Args:
        u, v: float32 or float64, of one shape; either may be None.
        indices: int32 [k], ascending, in 0..count-1.

    Raises:
        InvalidArgument, Unsupported: before anything changes.
    """
    given = [("u", u), ("v", v)]
    found = {name: inputs.array(x, name, REAL, write=True) for name, x in given if x is not None}
    if not found:
        raise InvalidArgument("momentum_mask: neither u nor v was given")
    first, *more = found.values()
    for x in more:
        inputs.same_shape(first, x, ("u", "v"))
        _same_dtype(first, x, ("u", "v"))
    where = inputs.array(indices, "indices", ("int32",))
    inputs.same_device([*found.values(), where], "momentum_mask")
    inputs.apart(found.values(), [where], "momentum_mask")
    devices.module(first.device).momentum_mask(
        found["u"].pointer if "u" in found else 0,
        found["v"].pointer if "v" in found else 0,
        first.count,
        first.dtype,
        (where.pointer, where.count),
        *devices.queue(first.device, first.array),
    )


@dataclass
class _Step:
    """The tensors of a call and what is chosen from them."""

    u: list[Located]
    v: list[Located]
    others: dict[str, list[Located]]  # "grad" and "weight": what is read
    ks: list[int]  # one for each tensor, or one
    together: bool  # whether indices count through all tensors
    each: int  # tensors to a choice

    @classmethod
    def of(cls, u: Any, v: Any, k: Any, others: dict[str, Any], *, together: bool = False) -> _Step:
        """What the user gave, checked one tensor at a time."""
        several = isinstance(u, list | tuple)
        given = {"u": u, "v": v, **others}
        lists = {name: _listed(x, name, several) for name, x in given.items()}
        lengths = {name: len(x) for name, x in lists.items()}
        if len(set(lengths.values())) > 1:
            raise InvalidArgument(f"the lists have different lengths: {lengths}")
        if lengths["u"] == 0:
            raise InvalidArgument("the lists are empty")
        found = {name: _located(x, name) for name, x in lists.items()}
        cls._check(found)
        listed = isinstance(k, list | tuple)
        if listed and not several:
            raise InvalidArgument("a list of k goes with lists of arrays")
        counts = [x.count for x in found["u"]]
        together = together or not listed
        if together and sum(counts) > inputs.MOST_ELEMENTS:
            raise InvalidArgument(
                f"the arrays have {sum(counts)} elements together, and an int32 index counts at "
                f"most {inputs.MOST_ELEMENTS}: choose from fewer"
            )
        if listed and len(k) != len(counts):
            raise InvalidArgument(f"{len(k)} values of k for {len(counts)} arrays")
        pairs = list(zip(k, counts, strict=True)) if listed else [(k, sum(counts))]
        ks = [inputs.how_many(one, count) for one, count in pairs]
        each = 1 if listed else len(counts)
        return cls(found.pop("u"), found.pop("v"), found, ks, together, each)

    @staticmethod
    def _check(found: dict[str, list[Located]]) -> None:
        first = found["u"][0]
        for i, tensors in enumerate(zip(*found.values(), strict=True)):
            for name, x in zip(found, tensors, strict=True):
                if found[name][0].dtype != x.dtype:
                    raise InvalidArgument(
                        f"{name}[{i}] is {x.dtype} and {name}[0] {found[name][0].dtype}: one call "
                        "takes one dtype"
                    )
                inputs.same_shape(tensors[0], x, ("u", name))
        _same_dtype(first, found["v"][0], ("u", "v"))
        grad = found.get("grad", [first])[0].dtype
        if (grad == "float64") != (first.dtype == "float64"):
            raise InvalidArgument(
                f"grad is {grad} and u {first.dtype}: float64 goes with float64, all other floats "
                "with float32"
            )
        weight = found.get("weight", [first])[0].dtype
        if weight not in (grad, first.dtype):
            raise InvalidArgument(f"weight is {weight}; it must be {grad} or {first.dtype}")

    @property
    def first(self) -> Located:
        return self.u[0]

    @property
    def read(self) -> list[Located]:
        return [x for tensors in self.others.values() for x in tensors]

    def dtype_of(self, name: str) -> str:
        return self.others[name][0].dtype

    def tables(self, chosen: _Chosen | None) -> tuple[tuple[int, int], tuple[int, int], str]:
        """DgcTables of the core. They live as long as this object."""
        nothing = [0] * len(self.u)
        grads = [x.pointer for x in self.others.get("grad", [])] or nothing
        weights = [x.pointer for x in self.others.get("weight", [])] or nothing
        pieces = [
            (g, w, u.pointer, v.pointer, u.count)
            for g, w, u, v in zip(grads, weights, self.u, self.v, strict=True)
        ]
        firsts = [0] * len(self.ks)
        if self.together and self.each == 1:
            firsts = list(itertools.accumulate([x.count for x in self.u[:-1]], initial=0))
        where = chosen.pointers() if chosen else [(0, 0, 0)] * len(self.ks)
        selections = [
            (self.each, k, first, *p) for k, first, p in zip(self.ks, firsts, where, strict=True)
        ]
        self._kept = inputs.Table(pieces), inputs.Table(selections)
        return self._kept[0].address, self._kept[1].address, self.first.dtype


class _Chosen:
    """Where a call's packets lie: one for each k, or one for all of them."""

    def __init__(self, step: _Step) -> None:
        self._ks = step.ks
        self._listed = not step.together
        self._arrays: dict[str, list[Any]] = {}
        self.columns: dict[str, list[Located]] = {}

    @classmethod
    def of(
        cls, step: _Step, indices: Any, values: Any, u_values: Any, *, write: bool = True
    ) -> _Chosen:
        """The caller's buffers; new ones for indices and values where there are none."""
        chosen = cls(step)
        real = step.first.dtype
        given = {"indices": (indices, "int32"), "values": (values, real)}
        if u_values is not None:
            given["u_values"] = (u_values, real)
        sizes = step.ks if chosen._listed else [sum(step.ks)]
        for name, (x, dtype) in given.items():
            each = [None] * len(sizes) if x is None else _listed(x, name, chosen._listed)
            if len(each) != len(sizes):
                raise InvalidArgument(f"{name} has {len(each)} arrays for {len(sizes)} of k")
            pairs = [
                inputs.output(one, name, step.first, k, dtype, write=write)
                for one, k in zip(each, sizes, strict=True)
            ]
            chosen._arrays[name] = [array for array, _ in pairs]
            chosen.columns[name] = [found for _, found in pairs]
        return chosen

    @property
    def located(self) -> list[Located]:
        return [x for column in self.columns.values() for x in column]

    def pointers(self) -> list[tuple[int, int, int]]:
        """(indices, values, u_values) of each k."""
        columns = [self._each(name) for name in ("indices", "values", "u_values")]
        return list(zip(*columns, strict=True))

    def _each(self, name: str) -> list[int]:
        column = self.columns.get(name)
        if column is None:
            return [0] * len(self._ks)
        if self._listed:
            return [x.pointer for x in column]
        itemsize = column[0].nbytes // max(1, column[0].count)
        starts = itertools.accumulate(self._ks[:-1], initial=0)
        return [column[0].pointer + itemsize * start for start in starts]

    def result(self) -> tuple[Any, Any]:
        indices, values = self._arrays["indices"], self._arrays["values"]
        return (indices, values) if self._listed else (indices[0], values[0])


def _listed(x: Any, name: str, several: bool) -> list[Any]:
    if isinstance(x, list | tuple) != several:
        kind = "a list" if several else "an array"
        raise InvalidArgument(f"{name} must be {kind}, as u is" if name != "u" else f"u: {kind}")
    return list(x) if several else [x]


def _located(tensors: list[Any], name: str) -> list[Located]:
    written = name in ("u", "v")
    dtypes = REAL if written else inputs.FLOATS
    label = "{}[{}]" if len(tensors) > 1 else "{}"
    return [
        inputs.array(x, label.format(name, i), dtypes, write=written) for i, x in enumerate(tensors)
    ]


def _same_dtype(one: Located, other: Located, names: tuple[str, str]) -> None:
    if one.dtype != other.dtype:
        raise InvalidArgument(
            f"{names[0]} is {one.dtype} and {names[1]} {other.dtype}: they must agree"
        )


def _flag(found_inf: Any) -> list[Located]:
    if found_inf is None:
        return []
    flag = inputs.array(found_inf, "found_inf", ("float32",))
    if flag.count != 1:
        raise InvalidArgument(f"found_inf has {flag.count} elements; it must have one")
    return [flag]


def _scale(scale: Any, step: _Step) -> tuple[float, list[Located]]:
    """(the number, []) or (1, [the array of numbers])."""
    if isinstance(scale, int | float | np.generic) or not hasattr(scale, "dtype"):
        return inputs.finite(scale, "scale"), []
    factors = inputs.array(scale, "scale", (step.first.dtype,))
    if factors.count != len(step.u):
        raise InvalidArgument(f"scale has {factors.count} numbers for {len(step.u)} arrays")
    return 1.0, [factors]
