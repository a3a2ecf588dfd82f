"""Names that pycomm does not have: those of other libraries, and typing errors.

`pycomm.get_rank` and the like fail with the text of hint(). The tables of docs/migration.md list
more, with the differences.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# By library, and by names as attributes of its module: pycomm's equivalent.
EQUIVALENTS = {
    "PyTorch DDP": {
        "init_process_group destroy_process_group": 'init_process_group("gloo") is pycomm.init()',
        "DistributedDataParallel DDP": "DistributedDataParallel(net) is pycomm.DataParallel(net)",
        "get_rank get_world_size": "get_rank(), get_world_size() is pycomm.rank(), pycomm.size()",
        "all_gather_into_tensor": "all_gather_into_tensor(out, x) is pycomm.all_gather(x, out=out)",
        "reduce_scatter_tensor": (
            "reduce_scatter_tensor(out, x) is pycomm.reduce_scatter(x, out=out)"
        ),
        "all_to_all_single": "all_to_all_single(out, x) is pycomm.all_to_all(x, out=out)",
        "isend irecv": "isend(x, dst), irecv(x, src) is pycomm.send(x, dst, async_op=True), recv",
        "broadcast_object_list gather_object scatter_object_list": (
            "broadcast_object_list(values, src) is pycomm.all_gather_object(value)[src]"
        ),
        "DistributedSampler": (
            "DistributedSampler(data), set_epoch is pycomm.data.DataLoader(data, ...)"
        ),
        "ReduceOp": 'all_reduce(x, op=ReduceOp.SUM) is pycomm.all_reduce(x, op="sum")',
        "new_group": "new_group(ranks) is group.split(color)",
        "PostLocalSGDOptimizer": 'PostLocalSGDOptimizer is pycomm.LocalSGD(..., rule="torch")',
        "convert_sync_batchnorm": (
            "nn.SyncBatchNorm.convert_sync_batchnorm(net) is "
            "pycomm.SyncBatchNorm.convert_sync_batchnorm(net)"
        ),
        "monitored_barrier": "monitored_barrier is any call",
    },
    "Paddle": {
        "init_parallel_env": "dist.init_parallel_env() is pycomm.init()",
        "spawn": "paddle.distributed.spawn(train, nprocs=2) is @pycomm.launcher(nproc=2)",
        "ParallelEnv": "dist.ParallelEnv() is pycomm.rank(), pycomm.local_rank(), pycomm.size()",
        "alltoall": "dist.alltoall(x) is pycomm.all_to_all(x)",
        "fleet": "fleet.distributed_model(net) is pycomm.DataParallel(net)",
        "DistributedBatchSampler": "paddle.io.DistributedBatchSampler is pycomm.data.DataLoader",
    },
    "MegEngine": {
        "group_barrier": "dist.group_barrier() is pycomm.barrier()",
        "is_distributed": "dist.is_distributed() is pycomm.is_initialized()",
        "all_reduce_sum all_reduce_max all_reduce_min": (
            "functional.all_reduce_sum(x), all_reduce_max, all_reduce_min is "
            'pycomm.all_reduce(x, "sum"), "max", "min"'
        ),
        "reduce_sum reduce_scatter_sum": (
            "functional.reduce_sum(x), reduce_scatter_sum(x) is "
            "pycomm.reduce(x), pycomm.reduce_scatter(x)"
        ),
        "WORLD": "dist.WORLD is group=None",
        "get_client": "get_client().user_set, user_get is pycomm.user_set, user_get",
    },
    "Horovod": {
        "broadcast_parameters broadcast_optimizer_state": (
            "hvd.broadcast_parameters(state, 0) is pycomm.bcast_list_(model.parameters())"
        ),
        "allgather": (
            "hvd.allgather(x), hvd.alltoall(x) is pycomm.all_gather(x), pycomm.all_to_all(x)"
        ),
        "allreduce_async allreduce_async_ synchronize": (
            "hvd.allreduce_async_(x), hvd.synchronize(handle) is "
            "pycomm.all_reduce(x, async_op=True).result()"
        ),
        "broadcast_object": "hvd.broadcast_object(value, 0) is pycomm.all_gather_object(value)[0]",
        "DistributedOptimizer": "hvd.DistributedOptimizer(opt) is pycomm.DataParallel(model)",
        "Compression": 'Compression.fp16 is pycomm.DGC(opt, value_dtype="bfloat16")',
        "allreduce allreduce_ Average Sum": (
            'hvd.allreduce(x, op=hvd.Average) is pycomm.all_reduce(x, op="avg")'
        ),
    },
}


def hint(name: str, ours: Iterable[str]) -> str:
    """A text with pycomm's equivalent of a name, or the nearest of `ours`; "" if there is none."""
    for library, texts in EQUIVALENTS.items():
        for theirs, text in texts.items():
            if name in theirs.split():
                return f"{library}'s {text} here"
    near = get_close_matches(name, ours, n=1, cutoff=0.75)
    return f"did you mean pycomm.{near[0]}?" if near else ""
