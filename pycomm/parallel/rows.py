"""Averages sparse gradients of embeddings: every rank gets all rows, added in rank order.

Nothing is compressed: nonzero rows are sent completely, as (row, values).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pycomm import collectives
from pycomm.errors import Unsupported
from pycomm.group import Group


def average_rows(gradient: Tensor | None, like: Tensor, group: Group) -> Tensor:
    """The mean of the ranks' sparse gradients [rows, *row]; the same bits on every rank.

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
