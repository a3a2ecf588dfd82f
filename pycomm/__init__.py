"""Collective communication for data-parallel training.

    import pycomm
    group = pycomm.init()
    pycomm.all_reduce(x)  # a NumPy array or a torch tensor, in place

The environment defines the ranks: pycomm's own variables or those of torchrun, Paddle, Open MPI,
MPICH or Slurm. Without any, the process is a group of size 1. `python -m pycomm info` shows what is
available on this machine.
"""

from __future__ import annotations

from importlib import import_module, machinery, util

import lazy_loader

if util.find_spec("pycomm._core") is None:
    raise ImportError(
        f"{__path__[0]} has no _core{machinery.EXTENSION_SUFFIXES[0]}: pycomm is not compiled for "
        "this Python; install it with this Python, or run `make build` in its repository"
    )

# Reachable, but neither in __all__ nor in dir(): few programs use them.
_UNLISTED = """
    QuantizeState QuantizedGradients StaticLossScaler algorithms all_gather_object bcast_list_
    dgc_hook host_count join load make_allreduce_cb plan print0 quantize_hook quantize_hsdp
    remote_recv remote_send save set_num_threads user_get user_pop user_set
"""

# __init__.pyi has the module of each name, which is imported at first use: training needs torch.
_load, _, _reachable = lazy_loader.attach_stub(__name__, __file__)
__all__ = [name for name in _reachable if name not in _UNLISTED.split()]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name in _reachable:
        globals()[name] = _load(name)
        return globals()[name]
    if util.find_spec(f"pycomm.{name}") is not None:
        return import_module(f"pycomm.{name}")
    hint = import_module("pycomm._names").hint(name, _reachable)
    raise AttributeError(f"module 'pycomm' has no attribute {name!r}{hint and f': {hint}'}")
