"""DGC under torch's own DistributedDataParallel. Called by users as pycomm.dgc_hook."""

# Annotations are not put off here: torch looks at those of a hook.
import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs hide it

from pycomm.compress.dgc import DGC

__all__ = ["dgc_hook"]


def dgc_hook(dgc: DGC, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """For `ddp.register_comm_hook(dgc, pycomm.dgc_hook)`.

    The exchange goes through pycomm's default group, which is torch's where its backend is pycomm.
    The step ends in the call with the last bucket, and raises there what it raises.
    """
    buckets = dgc.buckets
    if bucket.index() == 0:
        buckets.cancel()  # of a backward pass that did not reach its end
    flat = bucket.buffer()
    buckets.add(flat, bucket.parameters(), bucket.gradients())
    if bucket.is_last():
        buckets.finish()
    # torch reads the buckets behind the call with the last one, when all of them are final.
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(flat)
    return future
