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
from typing import TYPE_CHECKING

if util.find_spec("pycomm._core") is None:
    raise ImportError(
        f"{__path__[0]} has no _core{machinery.EXTENSION_SUFFIXES[0]}: pycomm is not compiled for "
        "this Python; install it with this Python, or run `make build` in its repository"
    )

from pycomm import errors
from pycomm._core_api.calls import Work
from pycomm._core_api.devices import set_num_threads
from pycomm._quantize import Quantize, QuantizeState
from pycomm.collectives import (
    algorithms,
    all_gather,
    all_gather_v,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from pycomm.default_group import (
    host_count,
    init,
    is_initialized,
    join,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from pycomm.group import Group
from pycomm.memory import empty
from pycomm.objects import all_gather_object, user_get, user_pop, user_set

if TYPE_CHECKING:
    from pycomm import data, functional, kernels, metrics, reference, testing
    from pycomm._training.coalesced import bcast_list_
    from pycomm.checkpoint import load, save
    from pycomm.compress import (
        DGC,
        QuantizedGradients,
        TopK,
        dgc_hook,
        quantize_hook,
        quantize_hsdp,
    )
    from pycomm.functional import remote_recv, remote_send
    from pycomm.launch import launcher
    from pycomm.optim import AdaptiveLocalSGD, LocalSGD, StaticLossScaler
    from pycomm.parallel import DataParallel, SyncBatchNorm, make_allreduce_cb
    from pycomm.tuning.planner import plan

__all__ = [
    "DGC",
    "AdaptiveLocalSGD",
    "DataParallel",
    "Group",
    "LocalSGD",
    "Quantize",
    "QuantizeState",
    "QuantizedGradients",
    "StaticLossScaler",
    "SyncBatchNorm",
    "TopK",
    "Work",
    "algorithms",
    "all_gather",
    "all_gather_object",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "barrier",
    "bcast_list_",
    "broadcast",
    "data",
    "dgc_hook",
    "empty",
    "errors",
    "functional",
    "gather",
    "host_count",
    "init",
    "is_initialized",
    "join",
    "kernels",
    "launcher",
    "load",
    "local_rank",
    "local_size",
    "make_allreduce_cb",
    "metrics",
    "plan",
    "print0",
    "quantize_hook",
    "quantize_hsdp",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "reference",
    "remote_recv",
    "remote_send",
    "save",
    "scatter",
    "send",
    "set_num_threads",
    "shutdown",
    "size",
    "testing",
    "user_get",
    "user_pop",
    "user_set",
]

# The training layer needs torch, the rest does not: its names are imported at first use.
_TRAINING = {
    "DGC": "pycomm.compress",
    "DataParallel": "pycomm.parallel",
    "AdaptiveLocalSGD": "pycomm.optim",
    "LocalSGD": "pycomm.optim",
    "QuantizedGradients": "pycomm.compress",
    "StaticLossScaler": "pycomm.optim",
    "SyncBatchNorm": "pycomm.parallel",
    "TopK": "pycomm.compress",
    "bcast_list_": "pycomm._training.coalesced",
    "dgc_hook": "pycomm.compress",
    "launcher": "pycomm.launch",
    "load": "pycomm.checkpoint",
    "make_allreduce_cb": "pycomm.parallel",
    "plan": "pycomm.tuning.planner",
    "print0": "pycomm.printing",
    "quantize_hook": "pycomm.compress",
    "quantize_hsdp": "pycomm.compress",
    "remote_recv": "pycomm.functional",
    "remote_send": "pycomm.functional",
    "save": "pycomm.checkpoint",
}
_MODULES = (
    "data",
    "elastic",
    "functional",
    "kernels",
    "metrics",
    "reference",
    "testing",
    "torch_backend",
)


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("importlib.metadata").version("pycomm-collectives")
    if name in _MODULES:
        return import_module(f"pycomm.{name}")
    if name not in _TRAINING:
        other = import_module("pycomm._names").hint(name, __all__)
        raise AttributeError(
            f"module 'pycomm' has no attribute {name!r}{f': {other}' if other else ''}"
        )
    return getattr(import_module(_TRAINING[name]), name)
