"""Data-parallel training with torch: gradients are averaged over all ranks."""

from pycomm.parallel.batch_norm import SyncBatchNorm
from pycomm.parallel.callback import make_allreduce_cb
from pycomm.parallel.data_parallel import DataParallel

__all__ = ["DataParallel", "SyncBatchNorm", "make_allreduce_cb"]
