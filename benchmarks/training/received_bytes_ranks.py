"""Bytes that real ranks send and receive in a step of DGC, by the counters of their transports.

Each rank is a process, connected to the others by tcp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import pycomm
from pycomm.compress.schedule import Load, received_bytes
from pycomm.testing import run_ranks

SPARSITY, VALUES = 0.999, "2bit"
LIMIT_S = 600  # against hangs: 16 processes may start on few processors


@dataclass(frozen=True)
class Moved:
    """Bytes of one step of one rank, frames and lengths among them."""

    written: int
    received: int
    sent: int  # as in stats(): without frames
    k: int


def moved(group: pycomm.Group, count: int, options: dict[str, Any]) -> Moved:
    """Collective: the second step of DGC on `count` elements. Gradients are drawn evenly: no index
    set is harder to code."""
    layer = nn.Linear(count, 1, bias=False)
    dgc = pycomm.DGC(torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9), **options)
    model = pycomm.DataParallel(layer, compression=dgc)
    own = torch.Generator().manual_seed(group.rank)
    model(
        torch.randn(1, count, generator=own)
    ).sum().backward()  # the gradient follows this generator only
    layer.zero_grad()
    before = group.stats()
    model(torch.randn(1, count, generator=own)).sum().backward()
    after = group.stats()
    stats = dgc.stats()
    return Moved(
        after.bytes_written - before.bytes_written,
        after.bytes_received - before.bytes_received,
        stats["sent_bytes"],
        stats["k"],
    )


def counted(exchange: str, size: int, count: int) -> dict[str, Any]:
    """One step of `size` processes: mean and maximum over them, and the estimate of "auto"."""
    options = {"sparsity": [SPARSITY], "value_dtype": VALUES, "exchange": exchange}
    found: Sequence[Moved] = run_ranks(
        size, moved, count, options, transport="tcp", processes=True, timeout_s=LIMIT_S
    )
    mean = sum(one.received for one in found) / size
    return {
        "exchange": exchange,
        "size": size,
        "received": mean,
        "most": max(one.received for one in found),
        "expected": received_bytes(Load([found[0].k], [count], 4, VALUES), size)[exchange],
        "per_element": mean / count,  # of the gradient's
    }
