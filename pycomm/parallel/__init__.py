"""Data-parallel training with torch: models whose gradients are averaged over all ranks."""

from pycomm.parallel.callback import make_allreduce_cb
from pycomm.parallel.data_parallel import DataParallel
from pycomm.parallel.replicas import bcast_list_

__all__ = ["DataParallel", "bcast_list_", "make_allreduce_cb"]
