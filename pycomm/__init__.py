"""Collective communication for data-parallel training.

    import pycomm
    group = pycomm.init()
    pycomm.all_reduce(x)  # a NumPy array or a torch tensor, in place

The environment says who the ranks are: pycomm's own variables, torchrun's, Paddle's, Open MPI's or
Slurm's; without any the process is a group of its own. `python -m pycomm info` shows what is here.
"""

from pycomm import errors
from pycomm.calls import Work
from pycomm.collectives import (
    algorithms,
    all_gather,
    all_gather_v,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    empty,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from pycomm.group import (
    Group,
    host_count,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    set_num_threads,
    shutdown,
    size,
)
from pycomm.values import all_gather_object, user_get, user_pop, user_set

__all__ = [
    "Group",
    "Work",
    "algorithms",
    "all_gather",
    "all_gather_object",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "empty",
    "errors",
    "gather",
    "host_count",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "set_num_threads",
    "shutdown",
    "size",
    "user_get",
    "user_pop",
    "user_set",
]
