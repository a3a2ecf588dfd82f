"""Training that continues after ranks were lost or joined: the agreed step, and the state of new
ranks."""

from pycomm.elastic.change import ShrinkResult
from pycomm.elastic.state import sync_state

__all__ = ["ShrinkResult", "sync_state"]
