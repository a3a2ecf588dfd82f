"""Sparse training with torch: deep gradient compression."""

from pycomm.compress.dgc import DGC
from pycomm.compress.hook import dgc_hook

__all__ = ["DGC", "dgc_hook"]
