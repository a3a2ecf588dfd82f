"""The interface between the reducer and the exchange of a full bucket.

`DenseExchange` sends gradients uncompressed, average_rows the sparse ones of embeddings;
pycomm.compress has the compressed exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pycomm import collectives
from pycomm._core_api.calls import Work
from pycomm._training.communicators import CommunicatorPool
from pycomm._training.loss_scale import LossScale
from pycomm.elastic.change import GroupChange
from pycomm.errors import Unsupported
from pycomm.group import Group


class Exchange(Protocol):
    """Takes the buckets of one backward pass, in the same order on all ranks, then ends the pass.

    An exchange that fails raises from any method; what it had taken counts as not sent.

    Attributes:
        idle: True while this rank has no data and only takes part in a pass of the others.
        scale: of the loss.
    """

    idle: bool
    scale: LossScale

    def compresses(self, parameter: Tensor, /) -> bool:
        """Whether the parameter's gradient needs buckets of a separate kind."""
        ...

    def add(
        self,
        flat: Tensor,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        lacking: Collection[Tensor] = (),
        /,
    ) -> None:
        """All gradients of a bucket are computed, as views into `flat`: may start sending them.
        `lacking`: parameters without a gradient on this rank, which may turn out to be unused."""
        ...

    def finish(self, unused: Collection[Tensor] = (), sparse: Sequence[Tensor] = (), /) -> None:
        """Returns when every gradient has its final value for the optimizer.

        Args:
            unused: parameters that no rank used. Their state stays as it is, and their gradients
                are not read.
            sparse: averaged sparse gradients, coalesced. Inf in one is as Inf in a bucket, and a
                step that all ranks skip writes a value that is not finite to each.
        """
        ...

    def cancel(self) -> None:
        """Discards a pass that did not complete."""
        ...

    def sync_from(self, src: int) -> None:
        """Copies the state that must be equal on all ranks from rank `src`. Collective."""
        ...

    def resume(self, change: GroupChange, counted: bool, /) -> float:
        """Resumes after the pool got another group. Collective.

        If `counted`, a pass that failed here counts as complete, as another rank completed it.
        State that must be equal on all ranks is copied from `change.source`. New ranks have no
        residual. Returns ShrinkResult.lost_residual_norm.
        """
        ...


class DenseExchange:
    """Sums over all ranks and divides once, after the last addition. It has no state."""

    def __init__(self, pool: CommunicatorPool) -> None:
        self.idle, self.scale = False, LossScale()
        self._pool = pool
        self._works: list[Work] = []

    def compresses(self, _: Tensor) -> bool:
        return False

    def add(self, flat: Tensor, *_: object) -> None:
        self._works.append(self._pool.all_reduce(flat, "avg"))

    def finish(self, *_: object) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def cancel(self) -> None:
        """Also waits: the buckets must not be written to meanwhile."""
        self.finish()

    def sync_from(self, src: int) -> None:
        """Does nothing."""

    def resume(self, *_: object) -> float:
        self._works = []
        return 0.0


def average_rows(gradient: Tensor | None, like: Tensor, group: Group) -> Tensor:
    """The mean of the ranks' sparse gradients [rows, *row]; the same bits on every rank.

    Nothing is compressed: every rank gets all nonzero rows, as (row, values), and adds them in rank
    order.

    Args:
        gradient: sparse COO with one sparse dimension; None: no rows on this rank.
        like: the parameter, for shape and dtype.
        group: the ranks.
    """
    if gradient is None:
        rows = torch.empty(0, dtype=torch.int64, device=like.device)
        values = like.new_empty((0, *like.shape[1:]))
    elif gradient.sparse_dim() != 1:
        raise Unsupported(
            f"unsupported sparse gradient: got {gradient.sparse_dim()} sparse dimensions, expected "
            "one, as of nn.Embedding"
        )
    else:
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0].contiguous(), gradient.values().contiguous()
    every_rows: list[Tensor] = collectives.all_gather_v(rows, group=group)
    every_values: list[Tensor] = collectives.all_gather_v(values, group=group)
    present, places = torch.unique(torch.cat(every_rows), return_inverse=True)
    total = like.new_zeros((len(present), *like.shape[1:]))
    parts = torch.split(places, [len(r) for r in every_rows])
    for there, part in zip(parts, every_values, strict=True):
        total.index_add_(0, there, part)  # the rows of one rank are distinct
    total.div_(group.size)
    return torch.sparse_coo_tensor(
        present[None], total, like.shape, is_coalesced=True, check_invariants=False
    )
