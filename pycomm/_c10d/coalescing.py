"""A coalescing manager for torch.distributed that ends after an error in its body."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from pycomm._c10d import compiled


def replace_manager(ours: type[compiled.Backend]) -> None:
    """Makes torch's coalescing manager end after an error in its body. torch's own keeps its state
    then, so that later collectives of the group return without effect.
    """
    torchs: Any = distributed_c10d._coalescing_manager

    @functools.wraps(torchs)
    @contextlib.contextmanager
    def manager(
        group: dist.ProcessGroup | None = None, device: Any = None, async_ops: bool = False
    ) -> Iterator[Any]:
        entered = False
        try:
            with torchs(group, device, async_ops) as works:
                entered = True
                yield works
        except BaseException:  # Ctrl-C too, raised again
            if entered:  # else the manager that contains this one continues
                _abandon(ours, group or distributed_c10d._get_default_group(), device)
            raise

    for module in (distributed_c10d, dist):
        module._coalescing_manager = manager  # type: ignore[attr-defined]  # a name of torch's


def _abandon(ours: type[compiled.Backend], group: dist.ProcessGroup, device: Any) -> None:
    distributed_c10d._world.pg_coalesce_state.pop(group, None)
    if device is not None:
        backend = unwrapped(group._get_backend(device))
        if isinstance(backend, ours):
            backend.abandon_coalescing()


def unwrapped(backend: Any) -> Any:
    """The backend under the one of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    return getattr(backend, "wrapped_pg", backend)
