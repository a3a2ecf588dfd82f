"""Training that continues after ranks were lost or joined: the agreed step, and the state of new
ranks."""

from pycomm.elastic.change import ShrinkResult
from pycomm.elastic.microbatches import Microbatch, Microbatches, RandomState, manual_seed
from pycomm.elastic.sharded import ShardedTraining
from pycomm.elastic.state import sync_state

__all__ = [
    "Microbatch",
    "Microbatches",
    "RandomState",
    "ShardedTraining",
    "ShrinkResult",
    "manual_seed",
    "sync_state",
]
