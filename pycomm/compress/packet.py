"""One packet: gradients that are compressed together.

    prepare    u and v accumulate the gradients, k elements of each are moved to the packet
    received   raw packets of all ranks, as pairs that bucket.py adds in rank order
    parts      buckets that packet_exchange.py encodes, if packets are coded
    mask       the packet as a dense gradient, for a dense sum (mathematically the same)

A packet has the values of all elements, then their indices. Indices count through the concatenated
gradients of a part. A part has one momentum and weight decay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from pycomm import kernels
from pycomm.compress.bucket import CompressionBucket, ReceivedPackets
from pycomm.compress.parameter_state import Hyper, ParameterState, flat_view
from pycomm.compress.residual import Elements, Transaction

INDEX_BYTES = 4


@dataclass(frozen=True)
class Update:
    """How gradients are accumulated in this step."""

    masking: bool
    unscale: float = 1.0  # one over the loss scale
    limit: float | None = None  # largest norm of a gradient on this rank
    norm: Tensor | None = None  # float64 [1]: the norm of all gradients, for global clipping
    idle: bool = False  # this rank has no data: neither gradient nor decay
    unused: Collection[ParameterState] = ()  # they have no decay


@dataclass(eq=False)
class _Part(CompressionBucket):
    """Parameters with the same Hyper, for one call of the kernel."""

    _: KW_ONLY
    hyper: Hyper
    u_values: Tensor


class Packet:
    """The packet of one step.

    Args:
        memories, gradients: of the compressed parameters, in the same order.
        ks: number of elements to send of each; or one number, of all together.
        workspaces: kernel workspaces kept between steps.

    Attributes:
        k: number of elements.
        parts: the parameters, by momentum and weight decay.
    """

    def __init__(
        self,
        memories: Sequence[ParameterState],
        gradients: Sequence[Tensor],
        ks: Sequence[int] | int,
        workspaces: dict[tuple[str, ...], Tensor],
    ) -> None:
        self._workspaces = workspaces
        self.k = ks if isinstance(ks, int) else sum(ks)
        real = memories[0].u.dtype
        device = memories[0].u.device
        itemsize = real.itemsize
        used = self.k * (itemsize + INDEX_BYTES)
        self.buffer = torch.empty(-(-used // 8) * 8, dtype=torch.uint8, device=device)
        self.buffer[used:] = 0
        self._layout = self.k * itemsize, used, real
        u_values = torch.empty(self.k, dtype=real, device=device)
        values, indices = self._open(self.buffer)
        self.parts: list[_Part] = []
        start = 0
        for hyper, places in _by_hyper(memories, separate=not isinstance(ks, int)):
            k: int | list[int] = ks if isinstance(ks, int) else [ks[i] for i in places]
            stop = start + (k if isinstance(k, int) else sum(k))
            self.parts.append(
                _Part(
                    [memories[i] for i in places],
                    [flat_view(gradients[i]) for i in places],
                    indices[start:stop],
                    values[start:stop],
                    k,
                    hyper=hyper,
                    u_values=u_values[start:stop],
                )
            )
            start = stop

    def _open(self, packet: Tensor) -> tuple[Tensor, Tensor]:
        """Values and indices of a packet, as views."""
        middle, end, real = self._layout
        return packet[:middle].view(real), packet[middle:end].view(torch.int32)

    def prepare(self, update: Update, transaction: Transaction) -> None:
        """Fills the packet; the transaction puts the elements back into u and v."""
        for part, scale in zip(self.parts, self._scales(update), strict=True):
            decay = 0.0 if update.idle else part.hyper.weight_decay
            u, v = ([m.u for m in part.memories], [m.v for m in part.memories if m.v is not None])
            kernels.dgc_step(
                part.gradients,
                u,
                v,
                part.k,
                momentum=part.hyper.momentum,
                weight=[
                    torch.zeros_like(memory.u)
                    if memory in update.unused
                    else flat_view(memory.parameter)
                    for memory in part.memories
                ],
                weight_decay=decay,
                nesterov=part.hyper.nesterov,
                masking=update.masking,
                scale=scale,
                indices=part.indices,
                values=part.values,
                u_values=part.u_values,
                workspace=self._workspace(part),
                together=True,
            )
            saved = [part.u_values, part.values]
            transaction.record(Elements([u, v], part.indices, saved))

    def _scales(self, update: Update) -> list[float | Tensor]:
        """For each part the factor of its gradients: one for all or one for each."""
        if update.limit is None:
            return [update.unscale] * len(self.parts)
        # The limit applies to the unscaled gradient; the buffers hold it divided by `unscale`.
        limit = update.limit / update.unscale
        if update.norm is None:
            norms = [kernels.norm(part.gradients) for part in self.parts]
        else:
            norms = [update.norm.repeat(len(part.gradients)) for part in self.parts]
        dtype = str(self._layout[2]).removeprefix("torch.")
        return [kernels.clip_scale(n, limit, update.unscale, dtype=dtype) for n in norms]

    def _workspace(self, part: _Part) -> Tensor | None:
        key = (str(part.k), *(memory.name for memory in part.memories))
        if key not in self._workspaces:
            u, v = [m.u for m in part.memories], [m.v for m in part.memories]
            self._workspaces[key] = kernels.dgc_workspace(u, v, part.k)
        return self._workspaces[key]

    def received(self, gathered: Tensor) -> Iterator[ReceivedPackets]:
        """The pairs in the raw packets of all ranks, uint8 [size, bytes], in rank order."""
        rows = [self._open(row) for row in gathered]
        start = 0
        for part in self.parts:
            stop = start + len(part.values)
            pairs = [(indices[start:stop], values[start:stop]) for values, indices in rows]
            yield ReceivedPackets(part, pairs)
            start = stop

    def mask(self) -> None:
        """Sets gradients to what this rank sends: the selected elements, and 0 elsewhere."""
        for part in self.parts:
            kernels.decode_sum(part.gradients, [(part.indices, part.values)])


def _by_hyper(memories: Sequence[ParameterState], separate: bool) -> list[tuple[Hyper, list[int]]]:
    """Positions of memories by Hyper; all under that of the first one unless `separate`."""
    found: dict[Hyper, list[int]] = {}
    for i, memory in enumerate(memories):
        found.setdefault(memory.hyper if separate else memories[0].hyper, []).append(i)
    return list(found.items())
