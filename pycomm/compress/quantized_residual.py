"""The residual of quantized gradients or updates, by parameter, whichever bucket it is in.

It is float32; of gradients in units of gradients times the loss scale. A name is missing in a state
if nothing was exchanged yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycomm._core_api import arrays
from pycomm._quantize import Feedback, Layout, blocks_of, own_count, own_places
from pycomm._training import coalesced
from pycomm._training.parameters import check_initialized
from pycomm.compress.residual import Change, Residual, Tensors
from pycomm.elastic.change import GroupChange
from pycomm.errors import InvalidArgument, Unsupported

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Shape:
    """A parameter: its name, its elements, the number of its first block, and its device."""

    name: str
    count: int
    first: int
    device: torch.device


class Bucket:
    """Parameters whose residuals are in one array."""

    def __init__(self, shapes: Sequence[_Shape], layout: Layout) -> None:
        self._shapes = {shape.name: shape for shape in shapes}
        self._own = [own_count(s.count, s.first, layout.rank, layout.size) for s in shapes]
        self.feedback = Feedback(layout, lambda n: torch.zeros(n, device=shapes[0].device))

    def views(self, now: bool = True) -> Mapping[str, Sequence[Tensor]]:
        """By name the residual and the owner's part; not `now`: the other ones of the feedback."""
        residual, owned = self.feedback.current if now else self.feedback.next
        counts = [shape.count for shape in self._shapes.values()]
        parts = torch.split(residual, counts), torch.split(owned, self._own)
        return dict(zip(self._shapes, zip(*parts, strict=True), strict=True))


class Turned(Change):
    """The residuals after the exchange of a bucket take the place of those before."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.exchange()

    def exchange(self) -> None:
        self._bucket.feedback.turn()

    def keep(self, parameters: Collection[Any]) -> None:
        before = self._bucket.views(now=False)
        for name, now in self._bucket.views().items():
            for x, old in zip(now, before[name], strict=True) if name in parameters else ():
                x.copy_(old)


class QuantizedResidual(Residual):
    """What this rank has not sent, of each parameter with 16 or 32 bits.

    Args:
        named: the parameters, in an order that is the same on all ranks.
        enabled: False: there is no error feedback.
        owner: the class, for errors.

    Attributes:
        nbytes: bytes of the parameters that are quantized.

    Raises:
        Unsupported: a parameter is neither in host memory nor on a GPU.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        enabled: bool = True,
        owner: str = "QuantizedGradients",
    ) -> None:
        self._shapes: dict[Tensor, _Shape] = {}
        self._known: set[Tensor] = set()
        self._enabled = enabled
        self._buckets: dict[tuple[str, ...], Bucket] = {}
        self.nbytes = 0
        self._frozen: dict[str, Tensor] | None = None  # None: not known yet
        first = 0
        for name, parameter in named:
            check_initialized(owner, [(name, parameter)])
            self._known.add(parameter)
            if parameter.dtype not in DTYPES:
                continue
            if not (parameter.is_cpu or arrays.on_gpu(parameter)):
                raise Unsupported(
                    f"Quantize: {name!r} is on {parameter.device}, where pycomm has no kernels: "
                    "use the CPU or a GPU"
                )
            self._shapes[parameter] = _Shape(name, parameter.numel(), first, parameter.device)
            first += blocks_of(parameter.numel())
            self.nbytes += parameter.numel() * parameter.element_size()
        self._named = {shape.name: shape for shape in self._shapes.values()}
        super().__init__(owner, {"residual": {}}, self._own)

    @property
    def columns(self) -> Mapping[str, dict[str, Tensor]]:
        found = dict(self._columns["residual"])
        for bucket in self._buckets.values():
            found |= {name: x for name, (x, _) in bucket.views().items()}
        return {"residual": {name: found[name] for name in self._named if name in found}}

    @property
    def owned(self) -> dict[str, Tensor]:
        found = dict(self._owned)
        for bucket in self._buckets.values():
            found |= {name: part for name, (_, part) in bucket.views().items()}
        return {name: found.get(name, x[:0]) for name, x in self.last.items()}

    @property
    def count(self) -> int:
        """Elements of all parameters that are quantized."""
        return sum(shape.count for shape in self._shapes.values())

    @property
    def device(self) -> torch.device:
        """Of the first parameter that is quantized."""
        return next(iter(self._shapes.values())).device

    def quantizes(self, parameter: Tensor) -> bool:
        """Whether the gradient is quantized.

        Raises:
            InvalidArgument: an unknown parameter.
        """
        if parameter not in self._known:
            raise InvalidArgument(
                f"{self._owner}: a parameter of shape {tuple(parameter.shape)} is not among "
                "named_parameters: pass those of the whole model"
            )
        return parameter in self._shapes

    def names(self, parameters: Iterable[Tensor]) -> list[str]:
        """The names of the parameters that are quantized, among these."""
        return [self._shapes[p].name for p in parameters if p in self._shapes]

    def create(self) -> None:
        """All parameters have a residual from now on."""
        found = self.last
        for shape in self._named.values():
            if shape.name not in found:
                self._columns["residual"][shape.name] = _zeros(shape)

    def layout(self, parameters: Sequence[Tensor], rank: int, size: int) -> Layout:
        """The blocks of a bucket with these parameters, for an owner among `size`."""
        shapes = [self._shapes[parameter] for parameter in parameters]
        return Layout([(shape.count, shape.first) for shape in shapes], rank, size)

    def bucket(self, parameters: Sequence[Tensor], layout: Layout) -> Bucket | None:
        """The residuals of a bucket; those of its parameters move into it. None: no feedback."""
        if not self._enabled:
            return None
        key = tuple(self.names(parameters))
        if key not in self._buckets:
            made = Bucket([self._named[name] for name in key], layout)
            last, owned = self.last, self.owned
            for name, (residual, part) in made.views().items():
                residual.copy_(last[name])
                if len(owned.get(name, ())):
                    part.copy_(owned[name])
            self._loosen([k for k in self._buckets if not set(k).isdisjoint(key)])
            for name in key:
                self._columns["residual"].pop(name)
                self._owned.pop(name, None)
            self._buckets[key] = made
        return self._buckets[key]

    def unsent(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The folded residual of each parameter; [] if all are 0."""
        names, last = self.names(parameters), self.last
        if not any(bool(last[name].any()) for name in names if name in last):
            return []
        self.create()
        last = self.last
        return [last[name] for name in names]

    def check_frozen(self) -> None:
        """Raises InvalidArgument if a parameter requires gradients that did not so before."""
        if self._frozen is None:
            shapes = self._shapes.items()
            self._frozen = {s.name: p for p, s in shapes if not p.requires_grad}
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise InvalidArgument(
                    f"{self._owner}: requires_grad of {name!r} was set after the first exchange: "
                    "set it before, and make the compression and the wrapper of the model anew"
                )

    def resume(self, change: GroupChange) -> None:
        """Collective. Moves the owner's part of this rank into its residual; new ranks get
        residuals of 0 if the others have some."""
        self.fold(change.before)
        self.to_ranks(change.before)
        if coalesced.bcast_value(bool(self.last), change.source, change.group):
            self.create()

    def _own(self, name: str, _: Sequence[int], rank: int, size: int) -> Tensor:
        shape = self._named[name]
        return torch.from_numpy(own_places(shape.count, shape.first, rank, size))

    def _expected(self, column: str, source: Mapping[str, Any]) -> Tensors:
        for name in source[column]:
            if name not in self._named:
                raise InvalidArgument(f"{self._owner}: the state has an unknown {name!r}")
        return {name: _zeros(self._named[name]) for name in source[column]}

    def _replace(self, owned: Tensors, columns: Mapping[str, Tensors] | None = None) -> None:
        loose = (columns or self.columns)["residual"]
        self._buckets = {}
        self._columns = {"residual": {name: self._like(name, x) for name, x in loose.items()}}
        self._owned = {name: self._like(name, x) for name, x in owned.items()}

    def _like(self, name: str, x: Tensor) -> Tensor:
        return x.to(self._named[name].device, torch.float32, copy=True)

    def _loosen(self, keys: Iterable[tuple[str, ...]]) -> None:
        """Dissolves buckets."""
        for bucket in [self._buckets.pop(key) for key in keys]:
            for name, (residual, part) in bucket.views().items():
                self._columns["residual"][name], self._owned[name] = residual, part


def _zeros(shape: _Shape) -> Tensor:
    return torch.zeros(shape.count, device=shape.device)
