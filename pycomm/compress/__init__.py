"""Sparse training with torch: deep gradient compression, and compression of updates."""

from pycomm.compress.dgc import DGC
from pycomm.compress.hook import dgc_hook
from pycomm.compress.topk import TopK

__all__ = ["DGC", "TopK", "dgc_hook"]
