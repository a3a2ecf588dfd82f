"""Makes `init_process_group("pycomm")` work without an import of pycomm.

torch calls `register` at the end of every `import torch` (entry point `torch.backends`; newer
versions also `torch.distributed.backends`), so it is light and never raises; the compiled module is
loaded when the first group is made. `pycomm.torch_backend` calls it too, for a torch that finds no
entry point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend as C10dBackend
    from torch._C._distributed_c10d import _DistributedBackendOptions

NAME = "pycomm"


def register(_module: object = None) -> None:
    """Gives torch.distributed the name "pycomm", for CPU tensors and, where this torch was built
    for CUDA or HIP, for CUDA tensors. Twice is fine."""
    try:
        import torch
        import torch.distributed as dist
        from torch.autograd import profiler

        from pycomm import calls

        calls.profiler = profiler
        if not dist.is_available() or NAME in dist.Backend.backend_list:
            return
        # torch and programs choose a tensor's device from this list, so it names no device type
        # that this torch lacks.
        devices = ["cpu", "cuda"] if torch.version.cuda or torch.version.hip else ["cpu"]
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
    except Exception:  # torch must stay importable, whatever is wrong with us
        import logging

        logging.getLogger(NAME).debug("not registered with torch.distributed", exc_info=True)


def _create(options: _DistributedBackendOptions, backend_options: object) -> C10dBackend:
    """Called by init_process_group and new_group on the ranks of the new group."""
    from pycomm import torch_backend

    return torch_backend.create(options, backend_options)
