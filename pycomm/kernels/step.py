"""The DGC step, its way back, and momentum factor masking (arXiv 1712.01887).

csrc/kernels/device_kernels.h has the formulas, pycomm.reference their meaning in NumPy. Called by
users, as pycomm.kernels, and by the training layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycomm import arrays
from pycomm.arrays import ArrayRef
from pycomm.errors import InvalidArgument
from pycomm.kernels import devices, inputs
from pycomm.kernels.inputs import Spans
from pycomm.kernels.rows import Rows

REAL = ("float32", "float64")
# What is in the core's DgcPiece and DgcSelection, in this order.
PIECE = ("grad", "weight", "u", "v", "count")
PACKET = ("indices", "values", "u_values")  # behind the pieces, k and the first index


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
        (indices int32 [k], ascending, values [k]), or a list of each, whose arrays lie end to end
        in one memory unless buffers were given.

    Raises:
        InvalidArgument, Unsupported: before anything changes.
    """
    numbers = inputs.finite(momentum, "momentum"), inputs.finite(weight_decay, "weight_decay")
    decay = numbers[1] != 0
    if decay and weight is None:
        raise InvalidArgument("weight_decay without weight: pass the parameters")
    others = {"grad": grad, **({"weight": weight} if decay else {})}
    step = _Step.of(u, v, k, others, "dgc_step", together=together)
    chosen = _Chosen.of(step, indices, values, u_values)
    flag = _flag(found_inf)
    factor, factors = _scale(scale, step)
    tables = step.tables(chosen)
    rows = step.rows
    module = devices.module(rows.device)
    room = inputs.workspace(workspace, rows, module.dgc_workspace_bytes(*tables), zeros=True)
    read: list[ArrayRef | Spans] = [*rows.spans(*others), *flag, *factors]
    written = [*rows.spans("u", "v"), *chosen.memory, room]
    inputs.same_device([*written, *read], "dgc_step")
    inputs.require_no_overlap(written, read, "dgc_step")
    module.dgc_step(
        *tables,
        rows.dtypes["grad"],
        rows.dtypes["weight" if decay else "grad"],
        *numbers,
        factor,
        factors[0].pointer if factors else 0,
        bool(nesterov),
        bool(masking),
        flag[0].pointer if flag else 0,
        (room.pointer, room.nbytes),
        *devices.queue(rows.device, rows.array),
    )
    return chosen.result()


def dgc_workspace(u: Any, v: Any, k: int | Sequence[int]) -> Any:
    """A new workspace for dgc_step with these arrays and k; uint8, on their device."""
    step = _Step.of(u, v, k, {}, "dgc_workspace")
    module = devices.module(step.rows.device)
    nbytes = module.dgc_workspace_bytes(*step.tables(None))
    return arrays.new(step.rows, (nbytes,), "uint8", zeros=True)


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
    step = _Step.of(u, v, k, {}, "dgc_rollback")
    chosen = _Chosen.of(step, indices, values, u_values, write=False)
    flag = _flag(found_inf)
    rows = step.rows
    written = rows.spans("u", "v")
    read: list[ArrayRef | Spans] = [*chosen.memory, *flag]
    inputs.same_device([*written, *read], "dgc_rollback")
    inputs.require_no_overlap(written, read, "dgc_rollback")
    devices.module(rows.device).dgc_rollback(
        *step.tables(chosen),
        flag[0].pointer if flag else 0,
        *devices.queue(rows.device, rows.array),
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
        _same_dtype(first.dtype, x.dtype)
    where = inputs.array(indices, "indices", ("int32",))
    inputs.same_device([*found.values(), where], "momentum_mask")
    inputs.require_no_overlap(found.values(), [where], "momentum_mask")
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

    rows: Rows  # of "u", "v" and what is read: "grad", "weight"
    ks: list[int]  # one for each tensor, or one
    together: bool  # whether indices count through all tensors
    each: int  # tensors to a choice

    @classmethod
    def of(
        cls, u: Any, v: Any, k: Any, others: dict[str, Any], call: str, *, together: bool = False
    ) -> _Step:
        """What the user gave, checked."""
        several = isinstance(u, list | tuple)
        given = {"u": u, "v": v, **others}
        lists = {name: _listed(x, name, several) for name, x in given.items()}
        lengths = {name: len(x) for name, x in lists.items()}
        if len(set(lengths.values())) > 1:
            raise InvalidArgument(f"the lists have different lengths: {lengths}")
        if lengths["u"] == 0:
            raise InvalidArgument("the lists are empty")
        dtypes = {name: REAL if name in ("u", "v") else inputs.FLOATS for name in lists}
        rows = Rows.of(lists, dtypes, call, write=("u", "v"))
        _go_together(rows.dtypes)
        listed = isinstance(k, list | tuple)
        if listed and not several:
            raise InvalidArgument("a list of k goes with lists of arrays")
        counts = rows.counts.tolist()
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
        return cls(rows, ks, together, 1 if listed else len(counts))

    def tables(self, chosen: _Chosen | None) -> tuple[tuple[int, int], tuple[int, int], str]:
        """DgcTables of the core. They live as long as this object."""
        rows = self.rows
        pieces = np.zeros((len(rows), len(PIECE)), np.uint64)
        pieces[:, [PIECE.index(name) for name in (*rows.given, "count")]] = rows.words
        selections = np.zeros((len(self.ks), 6), np.uint64)
        selections[:, 0] = self.each
        selections[:, 1] = self.ks
        if self.together and self.each == 1:
            selections[1:, 2] = np.cumsum(rows.counts[:-1])
        for place, name in enumerate(PACKET, 3):
            if chosen is not None and name in chosen.pointers:
                selections[:, place] = chosen.pointers[name]
        self._kept = inputs.Table(pieces), inputs.Table(selections)
        return self._kept[0].address, self._kept[1].address, rows.dtype


class _Chosen:
    """Where a call's packets lie: one for each k, or one for all of them.

    Attributes:
        pointers: of "indices", "values" and perhaps "u_values", by k.
        memory: all of it.
    """

    def __init__(self, step: _Step) -> None:
        self._step, self._listed = step, not step.together
        self._starts = np.array([0, *step.ks[:-1]], np.uint64).cumsum()
        self._arrays: dict[str, list[Any]] = {}
        self.pointers: dict[str, NDArray[np.uint64]] = {}
        self.memory: list[ArrayRef | Spans] = []

    @classmethod
    def of(
        cls, step: _Step, indices: Any, values: Any, u_values: Any, *, write: bool = True
    ) -> _Chosen:
        """The caller's buffers; new ones for indices and values where there are none."""
        chosen = cls(step)
        real = step.rows.dtype
        given = {"indices": (indices, "int32"), "values": (values, real)}
        if u_values is not None:
            given["u_values"] = (u_values, real)
        for name, (x, dtype) in given.items():
            if chosen._listed and x is not None:
                chosen._put_each(name, _listed(x, name, True), dtype, write)
            else:
                chosen._put(name, x, dtype, write)
        return chosen

    def _put(self, name: str, x: Any, dtype: str, write: bool) -> None:
        """All in one array, end to end."""
        ks = self._step.ks
        x, found = inputs.output(x, name, self._step.rows, sum(ks), dtype, write=write)
        self.pointers[name] = found.pointer + arrays.BYTES[dtype] * self._starts
        self.memory.append(found)
        self._arrays[name] = arrays.parts(x, ks) if self._listed else [x]

    def _put_each(self, name: str, each: list[Any], dtype: str, write: bool) -> None:
        """Each in an array of its own."""
        ks = self._step.ks
        if len(each) != len(ks):
            raise InvalidArgument(f"{name} has {len(each)} arrays for {len(ks)} of k")
        rows = Rows.try_fast({name: each})
        if rows is None or (rows.dtype, rows.flat, rows.counts.tolist()) != (dtype, True, ks):
            for one, k in zip(each, ks, strict=True):
                inputs.buffer(one, name, k, dtype, write=write)
            rows = Rows.of({name: each}, {name: (dtype,)}, name)
        self.pointers[name] = rows.words[:, 0]
        self.memory += rows.spans(name)
        self._arrays[name] = each

    def result(self) -> tuple[Any, Any]:
        indices, values = self._arrays["indices"], self._arrays["values"]
        return (indices, values) if self._listed else (indices[0], values[0])


def _go_together(dtypes: dict[str, str]) -> None:
    """Raises InvalidArgument unless these dtypes fit, each that of all arrays of a list."""
    u = dtypes["u"]
    _same_dtype(u, dtypes["v"])
    grad = dtypes.get("grad", u)
    if (grad == "float64") != (u == "float64"):
        raise InvalidArgument(
            f"grad is {grad} and u {u}: float64 goes with float64, all other floats with float32"
        )
    weight = dtypes.get("weight", u)
    if weight not in (grad, u):
        raise InvalidArgument(f"weight is {weight}; it must be {grad} or {u}")


def _same_dtype(u: str, v: str) -> None:
    if u != v:
        raise InvalidArgument(f"u is {u} and v {v}: they must agree")


def _listed(x: Any, name: str, several: bool) -> list[Any]:
    if isinstance(x, list | tuple) != several:
        kind = "a list" if several else "an array"
        raise InvalidArgument(f"{name} must be {kind}, as u is" if name != "u" else f"u: {kind}")
    return list(x) if several else [x]


def _flag(found_inf: Any) -> list[ArrayRef]:
    if found_inf is None:
        return []
    flag = inputs.array(found_inf, "found_inf", ("float32",))
    if flag.count != 1:
        raise InvalidArgument(f"found_inf has {flag.count} elements; it must have one")
    return [flag]


def _scale(scale: Any, step: _Step) -> tuple[float, list[ArrayRef]]:
    """(the number, []) or (1, [the array of numbers])."""
    if isinstance(scale, int | float | np.generic) or not hasattr(scale, "dtype"):
        return inputs.finite(scale, "scale"), []
    factors = inputs.array(scale, "scale", (step.rows.dtype,))
    if factors.count != len(step.rows):
        raise InvalidArgument(f"scale has {factors.count} numbers for {len(step.rows)} arrays")
    return 1.0, [factors]
