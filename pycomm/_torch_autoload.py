"""Registers the backend, so that `init_process_group("pycomm")` works without importing pycomm.

`register` runs at the end of every `import torch`: pycomm_torch_autoload.py, beside the package, is
the entry point. It must be fast and never raise; the compiled module is loaded when the first group
is made. `pycomm.torch_backend` also calls it, for a torch that loads no entry points.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend as C10dBackend
    from torch._C._distributed_c10d import _DistributedBackendOptions

NAME = "pycomm"


def register() -> None:
    """Registers the backend "pycomm" with torch.distributed, for CPU tensors and, if this torch was
    built for CUDA or HIP, for CUDA tensors. A second call has no effect.
    """
    try:
        import torch
        import torch.distributed as dist
        from torch.autograd import profiler

        from pycomm import _core

        _core.set_profiler(profiler)
        if not dist.is_available() or NAME in dist.Backend.backend_list:
            return
        # torch and programs choose a tensor's device from this list: name only device types that
        # this torch supports.
        devices = ["cpu", "cuda"] if torch.version.cuda or torch.version.hip else ["cpu"]
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
    except Exception:  # of any kind: `import torch` must not fail
        import logging

        logging.getLogger(NAME).debug("not registered with torch.distributed", exc_info=True)


def _create(options: _DistributedBackendOptions, backend_options: object) -> C10dBackend:
    """Makes the backend in init_process_group and new_group, on the ranks of the new group."""
    # By name: torch_backend imports this module.
    made: C10dBackend = import_module("pycomm.torch_backend").create(options, backend_options)
    return made
