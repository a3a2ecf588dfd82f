"""Data loading: each sample on one rank, prefetching, one copy per host. See docs/data.md."""

from pycomm.data.loader import DataLoader
from pycomm.data.memory import share
from pycomm.data.prefetch import Prefetcher
from pycomm.data.sampler import InfiniteSampler, ShardedSampler
from pycomm.data.scatter import ScatterLoader

__all__ = [
    "DataLoader",
    "InfiniteSampler",
    "Prefetcher",
    "ScatterLoader",
    "ShardedSampler",
    "share",
]
