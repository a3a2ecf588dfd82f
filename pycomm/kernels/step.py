"""The DGC step, its rollback, and momentum factor masking (Lin et al., arXiv 1712.01887).

csrc/kernels/device_kernels.h has the formulas, pycomm.reference their meaning in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pycomm._arguments import flag, integer, number, refuse
from pycomm._core_api import arrays, devices
from pycomm._core_api.arrays import ArrayRef
from pycomm.errors import InvalidArgument
from pycomm.kernels import inputs
from pycomm.kernels.inputs import Spans
from pycomm.kernels.rows import Rows

REAL = ("float32", "float64")
# The fields of the core's DgcPiece and DgcSelection, in this order.
PIECE = ("grad", "weight", "u", "v", "count")
PACKET = ("indices", "values", "u_values")  # after the pieces, k and the first index


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
    """One step of deep gradient compression (Lin et al., arXiv 1712.01887).

    Accumulates the gradient into u and v, then selects k elements of v and clears them. For each
    element `x = fma(weight_decay, weight, scale * grad); u = fma(momentum, u, x); v = v + u`
    (Nesterov: `t = u + x; u = momentum * t; v = v + (u + x)`). The k largest |v| are selected: the
    lower index among equal magnitudes, NaN above infinity, infinity above all numbers. There v
    becomes 0. u becomes 0 there with `masking`, or if the value is not finite.

    All arrays can be lists of arrays. With a list of k each array has its own k, and the result has
    lists. With one k the selection is among all arrays, concatenated.

    Args:
        grad: gradients, float16, bfloat16 or float32; float64 if u and v are float64. Read only.
        u: velocity, float32 or float64, of the gradient's shape or flat. In place.
        v: accumulated unsent velocity (the residual), as u. In place.
        k: number of elements to select, 0..count, or a list.
        momentum: the momentum factor.
        weight: parameters for weight decay, of the dtype of the gradient or of u. Read only; not
            read if `weight_decay` is 0.
        weight_decay: the factor of L2 weight decay.
        nesterov: Nesterov momentum.
        masking: momentum factor masking.
        scale: factor of the gradient: one number, or an array on the device of the dtype of u, with
            one factor for each array of the lists.
        found_inf: float32 [1] on the device. If it is not 0, nothing changes and the result is
            indices 0..k-1 and values 0.
        indices, values: buffers for the result: int32 [k], and [k] of the dtype of u; or lists.
        u_values: buffer for u at the indices before masking, as `values`; `dgc_rollback` needs it.
        workspace: from `dgc_workspace` for these arrays, kept between steps. It speeds up the
            selection and never changes a result; None: allocated by the call.
        together: with a list of k, make one packet: indices count through all arrays, concatenated,
            and the buffers have sum(k) elements.

    Returns:
        (indices int32 [k], ascending, values [k]), or a list of each. The arrays of such a list are
        views of one memory unless buffers were given.

    Raises:
        InvalidArgument: invalid arrays, numbers, k or buffers; nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    nesterov, masking = flag("nesterov", nesterov), flag("masking", masking)
    together = flag("together", together)
    numbers = number("momentum", momentum), number("weight_decay", weight_decay)
    decay = numbers[1] != 0
    if decay and weight is None:
        raise InvalidArgument(
            f"invalid weight: got None, expected the parameters, as weight_decay={numbers[1]}"
        )
    others = {"grad": grad, **({"weight": weight} if decay else {})}
    step = _Step.of(u, v, k, others, "dgc_step", together=together)
    chosen = _Chosen.of(step, indices, values, u_values)
    skip = _skip(found_inf)
    factor, factors = _scale(scale, step)
    tables = step.tables(chosen)
    rows = step.rows
    module = devices.module(rows.device)
    scratch = inputs.workspace(workspace, rows, module.dgc_workspace_bytes(*tables), zeros=True)
    read: list[ArrayRef | Spans] = [*rows.spans(*others), *skip, *factors]
    written = [*rows.spans("u", "v"), *chosen.memory, scratch]
    inputs.check_memory("dgc_step", written, read)
    module.dgc_step(
        *tables,
        rows.dtypes["grad"],
        rows.dtypes["weight" if decay else "grad"],
        *numbers,
        factor,
        factors[0].pointer if factors else 0,
        nesterov,
        masking,
        skip[0].pointer if skip else 0,
        (scratch.pointer, scratch.nbytes),
        *devices.queue(rows.device, rows.array),
    )
    return chosen.result()


def dgc_workspace(u: Any, v: Any, k: int | Sequence[int]) -> Any:
    """A new workspace for `dgc_step` with these arrays and k.

    The workspace belongs to these arrays: it keeps data between steps, so no other call may write
    it. Its size depends on the numbers of elements, the dtype and k.

    Args:
        u: velocity, float32 or float64, any shape, or a list of arrays.
        v: accumulated unsent velocity, of the shape and dtype of u, or a list.
        k: number of elements to select, 0..count, or a list with one k for each array.

    Returns:
        uint8 [n], zeros, on the device of u.

    Raises:
        InvalidArgument: invalid arrays or k.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    step = _Step.of(u, v, k, {}, "dgc_workspace")
    module = devices.module(step.rows.device)
    nbytes = module.dgc_workspace_bytes(*step.tables(None))
    return arrays.new(step.rows, (nbytes,), "uint8", zeros=True)


def dgc_rollback(
    u: Any, v: Any, indices: Any, values: Any, u_values: Any, *, found_inf: Any = None
) -> None:
    """Restores u and v to their values before the selection of a `dgc_step`, bit for bit.

    After it the step has sent nothing, but the gradient stays accumulated in u and v.

    Args:
        u, v: the arguments of that step, arrays or lists. In place.
        indices, values, u_values: the results of that step: int32 [k] and [k] of the dtype of u, or
            lists; one array each if indices count through all arrays.
        found_inf: the argument of that step, float32 [1]; if it is not 0, nothing changes.

    Raises:
        InvalidArgument: invalid or inconsistent arrays; nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
    """
    for name, given in (("indices", indices), ("values", values), ("u_values", u_values)):
        if given is None:  # of dgc_step: a buffer that was not given
            refuse(name, given, "the result of that step")
    several = isinstance(indices, list | tuple)
    each = list(indices) if several else [indices]
    ks = [inputs.array(one, "indices", ("int32",)).count for one in each]
    k = ks if several else ks[0]
    step = _Step.of(u, v, k, {}, "dgc_rollback")
    chosen = _Chosen.of(step, indices, values, u_values, write=False)
    skip = _skip(found_inf)
    rows = step.rows
    written = rows.spans("u", "v")
    read: list[ArrayRef | Spans] = [*chosen.memory, *skip]
    inputs.check_memory("dgc_rollback", written, read)
    devices.module(rows.device).dgc_rollback(
        *step.tables(chosen),
        skip[0].pointer if skip else 0,
        *devices.queue(rows.device, rows.array),
    )


def momentum_mask(u: Any, v: Any, indices: Any) -> None:
    """u[indices] = 0 and v[indices] = 0, in place: momentum factor masking.

    Args:
        u, v: float32 or float64, of one shape and dtype; one of them may be None.
        indices: int32 [k], ascending, in 0..count-1.

    Raises:
        InvalidArgument: invalid or inconsistent arrays, or neither u nor v; nothing changes.
        Unsupported: another kind of array, or CUDA kernels that are not built.
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
    inputs.check_memory("momentum_mask", found.values(), [where])
    devices.module(first.device).momentum_mask(
        found["u"].pointer if "u" in found else 0,
        found["v"].pointer if "v" in found else 0,
        (where.pointer, where.count),
        first.count,
        first.dtype,
        *devices.queue(first.device, first.array),
    )


@dataclass
class _Step:
    """The arrays of a call and the selections from them."""

    rows: Rows  # of "u", "v", and "grad" and "weight", which are read
    ks: list[int]  # one for each array, or one
    together: bool  # whether indices count through all arrays
    each: int  # arrays per selection

    @classmethod
    def of(
        cls, u: Any, v: Any, k: Any, others: dict[str, Any], call: str, *, together: bool = False
    ) -> _Step:
        """Validates the arguments of the user."""
        several = isinstance(u, list | tuple)
        given = {"u": u, "v": v, **others}
        lists = {name: _listed(x, name, several) for name, x in given.items()}
        lengths = {name: len(x) for name, x in lists.items()}
        if len(set(lengths.values())) > 1:
            raise InvalidArgument(f"invalid lists: got lengths {lengths}, expected one length")
        if lengths["u"] == 0:
            raise InvalidArgument("invalid lists: got empty ones, expected at least one array")
        dtypes = {name: REAL if name in ("u", "v") else inputs.FLOATS for name in lists}
        rows = Rows.of(lists, dtypes, call, write=("u", "v"))
        _check_dtypes(rows.dtypes)
        listed = isinstance(k, list | tuple)
        if listed and not several:
            raise InvalidArgument("invalid k: got a list, expected a number, as u is one array")
        counts = rows.counts.tolist()
        together = together or not listed
        if together and sum(counts) > inputs.MOST_ELEMENTS:
            raise InvalidArgument(
                f"the arrays have {sum(counts)} elements together, and an int32 index counts at "
                f"most {inputs.MOST_ELEMENTS}: select from fewer"
            )
        if listed and len(k) != len(counts):
            raise InvalidArgument(
                f"invalid k: got {len(k)} numbers, expected one for each of {len(counts)} arrays"
            )
        pairs = list(zip(k, counts, strict=True)) if listed else [(k, sum(counts))]
        ks = [integer("k", one, 0, count) for one, count in pairs]
        return cls(rows, ks, together, 1 if listed else len(counts))

    def tables(self, chosen: _Chosen | None) -> tuple[tuple[int, int], tuple[int, int], str]:
        """The core's DgcTables; valid while this object lives."""
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
    """The buffers of a call's packets: one for each k, or one for all of them.

    Attributes:
        pointers: addresses of "indices", "values" and, if given, "u_values", by k.
        memory: the memory of all buffers.
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
        """The caller's buffers, or new ones for indices and values."""
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
        """Adds one array for all packets, concatenated."""
        ks = self._step.ks
        x, found = inputs.output(x, name, self._step.rows, sum(ks), dtype, write=write)
        self.pointers[name] = found.pointer + arrays.BYTES[dtype] * self._starts
        self.memory.append(found)
        self._arrays[name] = arrays.parts(x, ks) if self._listed else [x]

    def _put_each(self, name: str, each: list[Any], dtype: str, write: bool) -> None:
        """Adds one array for each packet."""
        ks = self._step.ks
        if len(each) != len(ks):
            raise InvalidArgument(
                f"invalid {name}: got {len(each)} arrays, expected one for each of {len(ks)} k"
            )
        rows = Rows.try_fast({name: each})
        if rows is None or (rows.dtype, rows.flat, rows.counts.tolist()) != (dtype, True, ks):
            for one, k in zip(each, ks, strict=True):
                inputs.array(one, name, (dtype,), write=write, count=k)
            rows = Rows.of({name: each}, {name: (dtype,)}, name)
        self.pointers[name] = rows.words[:, 0]
        self.memory += rows.spans(name)
        self._arrays[name] = each

    def result(self) -> tuple[Any, Any]:
        indices, values = self._arrays["indices"], self._arrays["values"]
        return (indices, values) if self._listed else (indices[0], values[0])


def _check_dtypes(dtypes: dict[str, str]) -> None:
    """Raises InvalidArgument unless the dtypes of the lists are compatible."""
    u = dtypes["u"]
    _same_dtype(u, dtypes["v"])
    grad = dtypes.get("grad", u)
    if (grad == "float64") != (u == "float64"):
        raise InvalidArgument(
            f"invalid grad: got dtype {grad} with u of {u}: float64 needs float64, other floats "
            "float32"
        )
    weight = dtypes.get("weight", u)
    if weight not in (grad, u):
        raise InvalidArgument(f"invalid weight: got dtype {weight}, expected {grad} or {u}")


def _same_dtype(u: str, v: str) -> None:
    if u != v:
        raise InvalidArgument(f"invalid v: got dtype {v}, expected {u}, as u has")


def _listed(x: Any, name: str, several: bool) -> list[Any]:
    if isinstance(x, list | tuple) != several:
        kind = "a list, as u is" if several else "an array, as u is"
        raise InvalidArgument(f"invalid {name}: got {type(x).__name__}, expected {kind}")
    return list(x) if several else [x]


def _skip(found_inf: Any) -> list[ArrayRef]:
    if found_inf is None:
        return []
    found = inputs.array(found_inf, "found_inf", ("float32",))
    if found.count != 1:
        raise InvalidArgument(f"invalid found_inf: got {found.count} elements, expected one")
    return [found]


def _scale(scale: Any, step: _Step) -> tuple[float, list[ArrayRef]]:
    """(the number, []), or (1, [the array of factors])."""
    if isinstance(scale, int | float | np.generic) or not hasattr(scale, "dtype"):
        return number("scale", scale), []
    factors = inputs.array(scale, "scale", (step.rows.dtype,))
    if factors.count != len(step.rows):
        raise InvalidArgument(
            f"invalid scale: got {factors.count} numbers, expected one for each of "
            f"{len(step.rows)} arrays"
        )
    return 1.0, [factors]
