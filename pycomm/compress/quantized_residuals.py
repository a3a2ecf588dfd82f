"""The residuals of quantized gradients or updates by parameter, whichever bucket it is in.

    {"version", "rank", "size", "step", "scale", "exchange", "residual": {name: [count]},
     "owner_residual": {name: [elements that the rank owns]}, "hosts": [...]}  of one rank
    {"version", "size", "ranks": [one rank's, ...]}                            of all

Both are float32, flat, in the order of the parameter's memory; of gradients in units of gradients
times `scale`, the loss scale. A name is missing if its parameter was not exchanged yet. "hosts" has
the host of each rank if the ranks of a host share their residuals (hierarchical.py), else nothing:
then a host takes the place of a rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycomm import collectives
from pycomm._core_api import arrays
from pycomm._quantize import Feedback, Layout, blocks_of, fold, own_count
from pycomm._training import coalesced
from pycomm._training.parameters import check_initialized
from pycomm.compress.hierarchical import (
    HostGroups,
    average_copies,
    holder,
    hosts_of,
    rank_factor,
    saved_holder,
    saved_hosts,
)
from pycomm.elastic.change import GroupChange
from pycomm.errors import InvalidArgument, Unsupported
from pycomm.group import Group

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Pair = tuple[Tensor, Tensor]  # residual and owner residual, float32


@dataclass(frozen=True)
class _Shape:
    """A parameter: its name, its elements, the number of its first block, and its device."""

    name: str
    count: int
    first: int
    device: torch.device

    def zeros(self) -> Pair:
        """The residual, and an owner residual without elements, which is 0."""
        return torch.zeros(self.count, device=self.device), torch.zeros(0, device=self.device)


class QuantizedResiduals:
    """What this rank has not sent, of each parameter with 16 or 32 bits.

    Args:
        named: the parameters, in an order that is the same on all ranks.
        enabled: False: there is no error feedback.
        owner: the class, for errors.

    Attributes:
        nbytes: bytes of the parameters that are quantized.
        by_host: by rank, the host whose residuals it holds; []: each rank holds its own.
        unused: parameters that no rank used in the current pass.

    Raises:
        Unsupported: a parameter is neither in host memory nor on a GPU.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        enabled: bool = True,
        owner: str = "QuantizedGradients",
    ) -> None:
        self._owner = owner
        self._shapes: dict[Tensor, _Shape] = {}
        self._known: set[Tensor] = set()
        self._enabled = enabled
        self._buckets: dict[tuple[str, ...], Feedback] = {}
        self._loose: dict[str, Pair] = {}  # of parameters that are in no bucket
        self.nbytes = 0
        self.by_host: list[int] = []
        self.unused: Collection[Tensor] = ()
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

    def layout(self, parameters: Sequence[Tensor], rank: int, size: int) -> Layout:
        """The blocks of a bucket with these parameters, for an owner among `size`."""
        shapes = [self._shapes[parameter] for parameter in parameters]
        return Layout([(shape.count, shape.first) for shape in shapes], rank, size)

    def feedback(self, parameters: Sequence[Tensor], layout: Layout) -> Feedback | None:
        """The residuals of a bucket; those of its parameters move into it."""
        if not self._enabled:
            return None
        shapes = [self._shapes[parameter] for parameter in parameters]
        key = tuple(shape.name for shape in shapes)
        if key not in self._buckets:
            device = shapes[0].device
            made = Feedback(layout, lambda count: torch.zeros(count, device=device))
            for shape, new in zip(shapes, _parts(made), strict=True):
                for part, old in zip(new, self._take(shape.name) or (), strict=False):
                    if len(old) > 0:  # else the owner residual was folded: it is 0
                        part[:] = old
            self._buckets[key] = made
        return self._buckets[key]

    def unsent(self, parameters: Sequence[Tensor], create: bool) -> list[Tensor]:
        """The residual of each parameter, after fold_owned(), for an exchange that sends it
        exactly.

        Args:
            parameters: of a bucket.
            create: make residuals of 0 if there are none. False: the result is then empty.
        """
        shapes = [self._shapes[parameter] for parameter in parameters]
        if not create and not any(shape.name in self._loose for shape in shapes):
            return []
        found = []
        for shape in shapes:
            found.append(self._loose.setdefault(shape.name, shape.zeros())[0])
        return found

    def has_unsent(self, parameters: Sequence[Tensor]) -> bool:
        """Whether a state that was loaded has a residual of any of them."""
        names = [self._shapes[p].name for p in parameters if p in self._shapes]
        return any(bool(part.any()) for name in names for part in self._loose.get(name, ()))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """The residuals of unused parameters are the same after the block."""
        names = {self._shapes[p].name for p in self.unused if p in self._shapes}
        pairs = self._all() if names else ()
        before = {name: [x.clone() for x in pair] for name, pair in pairs if name in names}
        yield
        for name, pair in self._all() if before else ():
            for x, old in zip(pair, before.get(name, ()), strict=False):
                x.copy_(old)

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

    def multiply(self, factor: float) -> None:
        """Converts to another loss scale."""
        for _, pair in self._all():
            for part in pair:
                part.mul_(factor)

    def resume(self, change: GroupChange) -> None:
        """Collective. Moves the owner residuals of this rank into its residuals; new ranks get
        residuals of 0 of the parameters that were exchanged."""
        self.to_ranks(change.before)
        names = coalesced.bcast_value(sorted(self._loose), change.source, change.group)
        shapes = {shape.name: shape for shape in self._shapes.values()}
        for name in names if change.is_new else ():
            self._loose[name] = shapes[name].zeros()

    def to_hosts(self, hosts: HostGroups, group: Group) -> None:
        """Collective inside a host. Converts the residuals from one for each rank to one for each
        host."""
        self.fold_owned(group)
        average_copies(hosts, self.views(), hosts.share)
        self.by_host = hosts.of_rank

    def average_copies(self, hosts: HostGroups) -> None:
        """Collective inside a host. Makes the copies of its ranks equal after a failed step."""
        average_copies(hosts, [part for _, pair in self._all() for part in pair])

    def to_ranks(self, group: Group) -> None:
        """Converts the residuals of this rank in `group` from its host's to its own, if necessary,
        without owner residuals; not collective."""
        self.fold_owned(group)
        self.multiply(rank_factor(self.by_host, group.rank))
        self.by_host = []

    def fold_owned(self, group: Group) -> None:
        """Moves the owner residuals of this rank in `group` into its residuals."""
        rank, size = holder(self.by_host, group.rank, group.size)
        firsts = {shape.name: shape.first for shape in self._shapes.values()}
        for key in list(self._buckets):
            self._loosen(key)
        for name, (residual, owned) in self._loose.items():
            fold(residual, owned, firsts[name], rank, size)
        self._loose = {name: (pair[0], pair[1][:0]) for name, pair in self._loose.items()}

    def squares(self) -> float:
        """The sum of the squares of the residuals."""
        return sum(float(pair[0].double().square().sum()) for _, pair in self._all())

    def views(self) -> list[Tensor]:
        """The residuals of the exchanged parameters, in the order of `named`, without copies."""
        found = dict(self._all())
        names = [shape.name for shape in self._shapes.values() if shape.name in found]
        return [found[name][0] for name in names]

    def save(self) -> dict[str, Any]:
        """The residuals of this rank, as copies."""
        found = {name: [x.clone() for x in pair] for name, pair in self._all()}
        return {
            "residual": {name: pair[0] for name, pair in found.items()},
            "owner_residual": {name: pair[1] for name, pair in found.items()},
            "hosts": list(self.by_host),
        }

    def gather(self, group: Group, dst: int) -> list[dict[str, Any]] | None:
        """Collective. What save() returns on each rank, on `dst`; None elsewhere."""
        ranks: list[dict[str, Any]] = [
            {"residual": {}, "owner_residual": {}, "hosts": list(self.by_host)}
            for _ in range(group.size)
        ]
        holders = [holder(self.by_host, rank, group.size) for rank in range(group.size)]
        pairs = dict(self._all())
        for shape in self._shapes.values():
            if shape.name not in pairs:
                continue
            sizes = [own_count(shape.count, shape.first, *one) for one in holders]
            residual, owned = pairs[shape.name]
            padded = residual.new_zeros(max(sizes))
            padded[: len(owned)] = owned
            for key, part in (("residual", residual.clone()), ("owner_residual", padded)):
                rows = collectives.gather(part, dst, group=group)
                for rank, row in enumerate(() if rows is None else rows):
                    kept = shape.count if key == "residual" else sizes[rank]
                    ranks[rank][key][shape.name] = row[:kept].clone()
        return ranks if group.rank == dst else None

    def load(self, sources: Sequence[Mapping[str, Any]], group: Group) -> None:
        """Replaces the residuals by those of one rank, this one, or by the mean over all ranks.

        Raises:
            InvalidArgument: they do not fit; nothing changes.
        """
        shapes = {shape.name: shape for shape in self._shapes.values()}
        hosts = saved_hosts(sources[0])
        kept = len(sources) == 1 and hosts in ([], hosts_of(group))
        new: dict[str, Pair] = {}
        for name in sources[0]["residual"]:
            if name not in shapes:
                raise InvalidArgument(f"{self._owner}: the state has an unknown {name!r}")
            pairs = [_pair(source, shapes[name], self._owner) for source in sources]
            if kept:
                new[name] = pairs[0]
                continue
            total = shapes[name].zeros()[0].double()
            for source, (residual, owned) in zip(sources, pairs, strict=True):
                fold(residual, owned, shapes[name].first, *saved_holder(source))
                total += residual * rank_factor(saved_hosts(source), source["rank"])
            new[name] = (total / len(sources)).float(), shapes[name].zeros()[1]
        self._buckets, self._loose = {}, new
        self.by_host = list(hosts) if kept else []

    def _all(self) -> Iterator[tuple[str, Pair]]:
        """The residuals of each parameter, as views."""
        for key, feedback in self._buckets.items():
            yield from zip(key, _parts(feedback), strict=True)
        yield from self._loose.items()

    def _take(self, name: str) -> Pair | None:
        """Removes and returns the residuals of a parameter."""
        for key in list(self._buckets):
            if name in key:
                self._loosen(key)
        return self._loose.pop(name, None)

    def _loosen(self, key: tuple[str, ...]) -> None:
        """Dissolves a bucket."""
        for name, (residual, owned) in zip(key, _parts(self._buckets.pop(key)), strict=True):
            self._loose[name] = residual.clone(), owned.clone()


def _parts(feedback: Feedback) -> Iterator[Pair]:
    """The parts of each parameter in the current residuals of a bucket."""
    layout, (residual, owned) = feedback.layout, feedback.current
    at = own = 0
    for count, first in layout.arrays:
        kept = own_count(count, first, layout.rank, layout.size)
        yield residual[at : at + count], owned[own : own + kept]
        at, own = at + count, own + kept


def _pair(source: Mapping[str, Any], shape: _Shape, owner: str) -> Pair:
    """Copies of the residuals of a parameter in a rank's state."""
    owned = own_count(shape.count, shape.first, *saved_holder(source))
    found = []
    for key, counts in (("residual", (shape.count,)), ("owner_residual", (owned, 0))):
        tensor = source[key].get(shape.name)
        if tensor is None or tensor.dim() != 1 or len(tensor) not in counts:
            raise InvalidArgument(
                f"{owner}: invalid {key} of {shape.name!r}: got "
                f"{None if tensor is None else tuple(tensor.shape)}, expected ({counts[0]},): the "
                "state is of another model"
            )
        found.append(tensor.to(shape.device, torch.float32, copy=True))
    return found[0], found[1]
