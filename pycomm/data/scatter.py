"""pycomm.data.ScatterLoader: one rank reads batches, every rank gets its rows.

rank 0   header: batch, its layout    rows 0, 1, 2  ->  itself
rank 1   <- header                     rows 3, 4     <-  rank 0
rank 2   <- header                     rows 5, 6     <-  rank 0

Rows on a device are sent by a scatter of the group, which pads them to one length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pycomm import collectives, objects
from pycomm._arguments import integer, refuse
from pycomm._core_api import arrays
from pycomm._training.arguments import device_of
from pycomm.data.nested import flattened, on_values
from pycomm.default_group import chosen
from pycomm.errors import InvalidArgument
from pycomm.group import Group

TAG = 0xFFFFFF10  # of messages with rows
END, BATCH, FAILED = "end", "batch", "failed"


class ScatterLoader:
    """The batches of rank `src`'s loader, of which each rank gets its rows.

    For data that only one rank can read. Every batch is a tensor, or a list, tuple or dict of
    tensors and plain values. Rows are divided in order; if they do not divide evenly the first
    ranks get one more. Iterating is collective. A batch may be on a CUDA device: the other ranks
    get their rows in host memory, and rank `src` keeps its rows on the device (a Prefetcher moves
    them to each rank's device).

    Args:
        loader: on `src` any iterable of batches for all ranks; None on the other ranks.
        src: the rank that reads.
        group: the group to call in; None: the default group.
        device: of this rank's rows; None: host memory, and for rank `src` the device of its batch.

    Iterating raises on every rank.

    Raises:
        InvalidArgument: an argument is invalid. Iterating: a batch has no rows, or values that
            cannot be sent.
        RuntimeError: the loader failed; on `src` its own error.
    """

    def __init__(
        self,
        loader: Iterable[Any] | None,
        src: int = 0,
        group: Group | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._group = chosen(group)
        src = integer("src", src, 0, self._group.size - 1)
        if loader is not None and not hasattr(type(loader), "__iter__"):
            refuse("loader", loader, "an iterable of batches")
        if (self._group.rank == src) != (loader is not None):
            raise InvalidArgument(f"invalid loader: pass it on rank {src} only, None on the others")
        self._loader, self._src = loader, src
        self._device = None if device is None else device_of("device", device)

    def __iter__(self) -> Iterator[Any]:
        """Iterates once over the loader."""
        on_gpu = self._device is not None and self._device.type == arrays.torch_kind
        direct = all(objects.all_gather_object(on_gpu, group=self._group))
        if self._loader is None:
            while True:
                kind, layout = self._share_header(None)
                if kind == END:
                    return
                if kind == FAILED:
                    raise RuntimeError(f"rank {self._src}'s loader failed: {layout}")
                yield self._received(*layout)
        else:
            yield from self._sending(iter(self._loader), direct)

    def _share_header(self, mine: Any) -> Any:
        return objects.all_gather_object(mine, group=self._group)[self._src]

    def _sending(self, batches: Iterator[Any], direct: bool) -> Iterator[Any]:
        while True:
            try:
                tensors, outline = flattened(next(batches))
                sizes = _rows(tensors, self._group.size)
                sent = [self._prepared(x, direct) for x in tensors]
                kinds = [
                    (list(x.shape[1:]), str(x.dtype).removeprefix("torch."), arrays.on_gpu(x))
                    for x in sent
                ]
            except StopIteration:  # sent to the others
                self._share_header((END, None))
                return
            except Exception as error:  # of any kind: sent to the others
                self._share_header((FAILED, f"{type(error).__name__}: {error}"))
                raise
            self._share_header((BATCH, (sizes, kinds, outline)))
            self._send_rows(sent, sizes)
            mine = [torch.split(x, sizes)[self._src] for x in tensors]
            yield _filled(outline, [self._placed(x) for x in mine])

    def _prepared(self, x: Tensor, direct: bool) -> Tensor:
        """The tensor to send, contiguous: on this rank's device, or in host memory."""
        if not (direct and arrays.on_gpu(x)):
            return arrays.in_host_memory(x)  # type: ignore[no-any-return]  # a tensor
        x = x.detach().to(self._device).contiguous().resolve_neg()
        arrays.view(x)  # raises for a dtype that cannot be sent
        return x

    def _placed(self, x: Tensor) -> Tensor:
        return x if self._device is None else x.to(self._device)

    def _send_rows(self, tensors: list[Tensor], sizes: list[int]) -> None:
        """Sends the others their rows."""
        under_way = []
        for x in tensors:
            if arrays.on_gpu(x):
                self._scatter(x, x, sizes)
                continue
            for rank, part in enumerate(torch.split(x, sizes)):
                if rank != self._src and part.numel():
                    under_way.append(
                        collectives.send(part, rank, TAG, group=self._group, async_op=True)
                    )
        for work in under_way:
            work.wait()

    def _received(self, sizes: list[int], kinds: list[Any], outline: Any) -> Any:
        parts = []
        for shape, dtype, direct in kinds:
            count = sizes[self._group.rank]
            if direct:
                like = torch.empty([0, *shape], dtype=getattr(torch, dtype), device=self._device)
                parts.append(self._scatter(None, like, sizes))
                continue
            part = torch.empty([count, *shape], dtype=getattr(torch, dtype))
            if part.numel():
                collectives.recv(part, self._src, TAG, group=self._group)
            parts.append(self._placed(part))
        return _filled(outline, parts)

    def _scatter(self, x: Tensor | None, like: Tensor, sizes: list[int]) -> Tensor:
        """This rank's rows of `x` on a device, which rank `src` passes; `like` has their dtype."""
        most, row = max(sizes), like.shape[1:]
        out = like.new_empty([most, *row])
        if out.numel():
            if x is not None and sum(sizes) < most * len(sizes):
                padded = x.new_zeros([len(sizes), most, *row])
                for target, part in zip(padded, torch.split(x, sizes), strict=True):
                    target[: len(part)] = part
                x = padded
            if x is not None:
                x = x.reshape(len(sizes), most, *row)
            collectives.scatter(x, self._src, out, group=self._group)
        return out[: sizes[self._group.rank]]


def _rows(tensors: list[Tensor], size: int) -> list[int]:
    """The number of rows of each rank."""
    counts = {x.shape[0] if x.dim() else -1 for x in tensors}
    if len(counts) != 1 or -1 in counts:
        raise InvalidArgument(f"invalid batch: its tensors have {counts} rows, expected one number")
    count = counts.pop()
    return [count // size + (rank < count % size) for rank in range(size)]


def _filled(outline: Any, parts: list[Tensor]) -> Any:
    """The outline with the tensors in place of their numbers."""

    def part(value: Any) -> Any:
        numbered = isinstance(value, str) and value.startswith("\0")
        return parts[int(value[1:])] if numbered else value

    return on_values(outline, part)
