"""pycomm.data.ScatterLoader: one rank reads batches, every rank gets its rows.

rank 0   header: batch, its layout    rows 0, 1, 2  ->  itself
rank 1   <- header                     rows 3, 4     <-  rank 0
rank 2   <- header                     rows 5, 6     <-  rank 0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pycomm import collectives, objects
from pycomm._core_api import arrays
from pycomm.data.nested import flattened
from pycomm.default_group import default
from pycomm.errors import InvalidArgument
from pycomm.group import Group

__all__ = ["ScatterLoader"]

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

    Iterating raises on every rank.

    Raises:
        InvalidArgument: a batch has no rows, or values that cannot be sent.
        RuntimeError: the loader failed; on `src` its own error.
    """

    def __init__(
        self, loader: Iterable[Any] | None, src: int = 0, group: Group | None = None
    ) -> None:
        self._group = group or default()
        if (self._group.rank == src) != (loader is not None):
            raise InvalidArgument(f"invalid loader: pass it on rank {src} only, None on the others")
        self._loader, self._src = loader, src

    def __iter__(self) -> Iterator[Any]:
        """Iterates once over the loader."""
        if self._loader is None:
            while True:
                kind, layout = self._share_header(None)
                if kind == END:
                    return
                if kind == FAILED:
                    raise RuntimeError(f"rank {self._src}'s loader failed: {layout}")
                yield self._received(*layout)
        else:
            yield from self._sending(iter(self._loader))

    def _share_header(self, mine: Any) -> Any:
        return objects.all_gather_object(mine, group=self._group)[self._src]

    def _sending(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            try:
                tensors, outline = flattened(next(batches))
                sizes = _rows(tensors, self._group.size)
                sent = [arrays.in_host_memory(x) for x in tensors]
                kinds = [(list(x.shape[1:]), str(x.dtype).removeprefix("torch.")) for x in tensors]
            except StopIteration:  # sent to the others
                self._share_header((END, None))
                return
            except Exception as error:  # of any kind: sent to the others
                self._share_header((FAILED, f"{type(error).__name__}: {error}"))
                raise
            self._share_header((BATCH, (sizes, kinds, outline)))
            self._send_rows(sent, sizes)
            yield _filled(outline, [torch.split(x, sizes)[self._src] for x in tensors])

    def _send_rows(self, tensors: list[Tensor], sizes: list[int]) -> None:
        """Sends the others their rows, from host memory."""
        under_way = []
        for x in tensors:
            for rank, part in enumerate(torch.split(x, sizes)):
                if rank != self._src and part.numel():
                    under_way.append(
                        collectives.send(part, rank, TAG, group=self._group, async_op=True)
                    )
        for work in under_way:
            work.wait()

    def _received(self, sizes: list[int], kinds: list[Any], outline: Any) -> Any:
        parts = []
        for shape, dtype in kinds:
            part = torch.empty([sizes[self._group.rank], *shape], dtype=getattr(torch, dtype))
            if part.numel():
                collectives.recv(part, self._src, TAG, group=self._group)
            parts.append(part)
        return _filled(outline, parts)


def _rows(tensors: list[Tensor], size: int) -> list[int]:
    """The number of rows of each rank."""
    counts = {x.shape[0] if x.dim() else -1 for x in tensors}
    if len(counts) != 1 or -1 in counts:
        raise InvalidArgument(f"invalid batch: its tensors have {counts} rows, expected one number")
    count = counts.pop()
    return [count // size + (rank < count % size) for rank in range(size)]


def _filled(outline: Any, parts: list[Tensor]) -> Any:
    """The outline with the tensors in place of their numbers."""
    if isinstance(outline, str) and outline.startswith("\0"):
        return parts[int(outline[1:])]
    if isinstance(outline, dict):
        return {key: _filled(part, parts) for key, part in outline.items()}
    if isinstance(outline, (list, tuple)):
        return type(outline)(_filled(part, parts) for part in outline)
    return outline
