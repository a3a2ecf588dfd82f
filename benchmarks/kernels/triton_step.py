"""The update of a DGC step as a kernel of Triton's. Needs Triton,
which is part of torch for CUDA."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


# Triton has no types, and what it compiles takes none.
@triton.jit  # type: ignore[untyped-decorator]
def _update(u, v, grad, magnitudes, momentum, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    moved = momentum * tl.load(u + places, inside) + tl.load(grad + places, inside)
    summed = tl.load(v + places, inside) + moved
    tl.store(u + places, moved, inside)
    tl.store(v + places, summed, inside)
    tl.store(magnitudes + places, tl.abs(summed), inside)


def update(u: Tensor, v: Tensor, grad: Tensor, magnitudes: Tensor, momentum: float) -> None:
    """u = momentum * u + grad; v = v + u; magnitudes = |v|, in one pass."""
    count = u.numel()
    _update[(triton.cdiv(count, BLOCK),)](
        u, v, grad, magnitudes, momentum, count, BLOCK, num_warps=8
    )
