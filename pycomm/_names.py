"""Names of PyTorch DDP, Paddle, MegEngine and Horovod, and what pycomm has instead.

`python tools/migration.py` writes the tables of docs/migration.md from ROWS. `pycomm.get_rank` and
the like fail with the text of hint(); arguments of these libraries go through also_named().
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

__all__ = ["ROWS", "Row", "also_named", "hint"]

P = ParamSpec("P")
R = TypeVar("R")


class Row(NamedTuple):
    """A row of a table, in Markdown."""

    theirs: str
    ours: str
    differences: str = ""
    names: str = ""  # of theirs, as attributes of their module


ROWS: dict[str, tuple[Row, ...]] = {
    "PyTorch DDP": (
        Row(
            '`init_process_group("gloo")`',
            "`pycomm.init()`",
            "no import of torch needed",
            "init_process_group destroy_process_group",
        ),
        Row(
            "`DistributedDataParallel(net)`",
            "`pycomm.DataParallel(net)`",
            "divides once, after the sum: the same bits with 2 ranks; limits buckets by layers too",
            "DistributedDataParallel DDP",
        ),
        Row(
            "`bucket_cap_mb=`, `process_group=`, `device_ids=`",
            "`bucket_mb=`, `group=`, none",
            "`bucket_cap_mb` is accepted; move the module to its device first",
        ),
        Row(
            "`get_rank()`, `get_world_size()`",
            "`pycomm.rank()`, `pycomm.size()`",
            "a group has `group.rank`, `group.size`",
            "get_rank get_world_size",
        ),
        Row(
            "`all_gather_into_tensor(out, x)`",
            "`pycomm.all_gather(x, out=out)`",
            "",
            "all_gather_into_tensor",
        ),
        Row(
            "`reduce_scatter_tensor(out, x)`",
            "`pycomm.reduce_scatter(x, out=out)`",
            "",
            "reduce_scatter_tensor",
        ),
        Row(
            "`all_to_all_single(out, x)`",
            "`pycomm.all_to_all(x, out=out)`",
            "",
            "all_to_all_single",
        ),
        Row(
            "`isend(x, dst)`, `irecv(x, src)`",
            "`pycomm.send(x, dst, async_op=True)`, `recv`",
            "returns a `Work`",
            "isend irecv",
        ),
        Row(
            "`broadcast_object_list(values, src)`",
            "`pycomm.all_gather_object(value)[src]`",
            "",
            "broadcast_object_list gather_object scatter_object_list",
        ),
        Row("`register_comm_hook(state, hook)`", "`ddp.register_comm_hook(dgc, pycomm.dgc_hook)`"),
        Row(
            "`DistributedSampler(data)`, `set_epoch`",
            "`pycomm.data.DataLoader(data, ...)`",
            "repeats samples only with `pad=True`; counts epochs",
            "DistributedSampler",
        ),
        Row(
            "`all_reduce(x, op=ReduceOp.SUM)`",
            '`pycomm.all_reduce(x, op="sum")`',
            "returns `x`; takes torch's `ReduceOp` too",
            "ReduceOp",
        ),
        Row(
            "`all_gather(list, x)`",
            "`pycomm.all_gather(x)`",
            "returns [size, ...], without gradient",
        ),
        Row(
            "`all_gather_object(list, value)`",
            "`pycomm.all_gather_object(value)`",
            "plain values only, no pickle",
        ),
        Row(
            "`new_group(ranks)`",
            "`group.split(color)`",
            "collective over the parent; returns None with `color=None`",
            "new_group",
        ),
        Row(
            "`torch.save` on rank 0, `barrier()`",
            "`pycomm.save(obj, path)`",
            "atomic; all ranks raise on failure",
        ),
        Row(
            "`PostLocalSGDOptimizer`",
            '`pycomm.LocalSGD(..., rule="torch")`',
            '`rule="paddle"` averages after other steps',
            "PostLocalSGDOptimizer",
        ),
        Row(
            "`nn.SyncBatchNorm.convert_sync_batchnorm(net)`",
            "`pycomm.SyncBatchNorm.convert_sync_batchnorm(net)`",
            "torch's raises an error on the CPU; `group=` in place of `process_group=`",
            "convert_sync_batchnorm",
        ),
        Row(
            "`distributed.nn.functional.all_reduce(x)`, `all_gather(x)`",
            "`pycomm.functional.all_reduce(x)`, `pycomm.functional.all_gather(x)`",
            "all_gather returns [size, ...]; gradients of gradients too",
        ),
        Row(
            "`torchrun`",
            "`torchrun` or `pycomm launch`",
            "one log per rank; the first failure is printed first",
        ),
        Row(
            "`monitored_barrier`",
            "any call",
            "every `Timeout` names the missing ranks",
            "monitored_barrier",
        ),
    ),
    "Paddle": (
        Row(
            "`dist.init_parallel_env()`",
            "`pycomm.init()`",
            "also reads `PADDLE_TRAINER_ID` and related variables",
            "init_parallel_env",
        ),
        Row(
            "`python -m paddle.distributed.launch --gpus=0,1 x.py`",
            "`pycomm launch --gpus=0,1 x.py`",
            "prints the configuration tables; `--log-dir` for logs",
        ),
        Row(
            "`--ips=host0,host1`",
            "`pycomm launch --nnodes 2 --rdzv-endpoint host0:29400`",
            "the same line on each host, with one endpoint for all",
        ),
        Row(
            "`paddle.distributed.spawn(train, nprocs=2)`",
            "`@pycomm.launcher(nproc=2)`",
            "a decorator of `train`",
            "spawn",
        ),
        Row(
            "`dist.ParallelEnv()`",
            "`pycomm.rank()`, `pycomm.local_rank()`, `pycomm.size()`",
            "",
            "ParallelEnv",
        ),
        Row("`dist.alltoall(x)`", "`pycomm.all_to_all(x)`", "", "alltoall"),
        Row(
            "`fleet.distributed_model(net)`",
            "`pycomm.DataParallel(net)`",
            "strategies are its arguments",
            "fleet",
        ),
        Row("`paddle.DataParallel(model)`", "`pycomm.DataParallel(model)`"),
        Row(
            "`paddle.nn.SyncBatchNorm.convert_sync_batchnorm(net)`",
            "`pycomm.SyncBatchNorm.convert_sync_batchnorm(net)`",
            "on the CPU too",
        ),
        Row(
            "`paddle.io.DistributedBatchSampler`",
            "`pycomm.data.DataLoader`",
            "repeats samples only with `pad=True`; counts epochs",
            "DistributedBatchSampler",
        ),
        Row(
            "generator, infinite reader",
            "`pycomm.data.DataLoader(function, transform=)`",
            "divided among ranks and workers; [an iterable needs `divide=`](data.md#streams)",
        ),
        Row(
            "`strategy.dgc`, `dgc_configs`",
            "[`pycomm.DGC(optimizer, rampup_begin_step, rampup_step, sparsity)`](compression.md)",
            "see below",
        ),
        Row(
            "`strategy.localsgd`, `localsgd_configs`",
            "`pycomm.LocalSGD(model, optimizer, k_steps, begin_step)`",
            "any optimizer",
        ),
        Row(
            "`strategy.adaptive_localsgd`",
            "`pycomm.AdaptiveLocalSGD(model, optimizer, init_k_steps, begin_step)`",
            "`step(loss)` takes the loss; a loss of 0 raises an error",
        ),
        Row(
            "`use_local_sgd`, `local_sgd_is_warm_steps`, `local_sgd_steps`",
            "`LocalSGD`, `begin_step`, `k_steps`",
        ),
        Row(
            "`fuse_all_reduce_ops`, `FLAGS_fuse_parameter_memory_size`, "
            "`FLAGS_fuse_parameter_groups_size`",
            "`bucket_mb=`, `bucket_layers=`",
            'on by default, 25 MB; `"auto"` is a tenth of all gradients',
        ),
        Row(
            "`use_hierarchical_allreduce`, `nccl_comm_num`",
            "`hierarchical=`, `lanes=`",
            "2 lanes between hosts by default",
        ),
        Row(
            "`paddle.metric.accuracy(input, label, k)`",
            "`pycomm.metrics.accuracy(scores, labels, k)`",
            "of this rank; `pycomm.metrics.Accuracy` counts over all ranks",
        ),
        Row("`fetch_frequency`", "`pycomm.metrics.Mean(every=n)`"),
        Row(
            "`use_double_buffer`, uint8 reader",
            "`pycomm.data.Prefetcher(loader, device, depth=2, convert=)`",
        ),
        Row("`fuse_bn_act_ops`, `fuse_elewise_add_act_ops`", "`torch.compile`"),
        Row("parameter server", "none", "training is synchronous data parallel, or LocalSGD"),
    ),
    "MegEngine": (
        Row(
            "`@dist.launcher(n_gpus=2)`",
            "`@pycomm.launcher(nproc=2)`",
            'processes are spawned: the script needs `if __name__ == "__main__":`',
        ),
        Row(
            "`world_size`, `rank_start`, `master_ip`, `port`",
            "`size`, `rank_start`, `master_addr`, `master_port`",
            "MegEngine's names are accepted",
        ),
        Row(
            "`dist.init_process_group(master_ip, port, world_size, rank)`",
            '`pycomm.init(rank=rank, size=world_size, master=f"{ip}:{port}")`',
            "or without arguments, by the environment",
        ),
        Row("`dist.group_barrier()`", "`pycomm.barrier()`", "", "group_barrier"),
        Row("`dist.is_distributed()`", "`pycomm.is_initialized()`", "", "is_distributed"),
        Row(
            "`functional.all_reduce_sum(x)`, `all_reduce_max`, `all_reduce_min`",
            '`pycomm.all_reduce(x, "sum")`, `"max"`, `"min"`',
            "in place; `pycomm.functional.all_reduce` has gradients",
            "all_reduce_sum all_reduce_max all_reduce_min",
        ),
        Row(
            "`functional.reduce_sum(x)`, `reduce_scatter_sum(x)`",
            "`pycomm.reduce(x)`, `pycomm.reduce_scatter(x)`",
            "",
            "reduce_sum reduce_scatter_sum",
        ),
        Row("`dist.WORLD`", "`group=None`", "the default group", "WORLD"),
        Row(
            "`dist.bcast_list_(net.parameters())`",
            "`pycomm.bcast_list_(net.parameters())`",
            "one call per dtype",
        ),
        Row(
            '`attach(params, callbacks=[make_allreduce_cb("mean")])`',
            '`p.register_post_accumulate_grad_hook(pycomm.make_allreduce_cb("mean"))`',
            "one callback for all parameters; packed, sent during backward",
        ),
        Row(
            "`get_client().user_set`, `user_get`",
            "`pycomm.user_set`, `user_get`",
            "no client object; plain values, `torch.Size` and NumPy arrays",
            "get_client",
        ),
        Row(
            "`functional.remote_send(x, dest_rank)`, `gm.backward([])`",
            "`pycomm.remote_send(x, dst).backward()`",
            "`dest_rank=` is accepted; CUDA tensors pass through host memory",
        ),
        Row(
            "`remote_recv(src_rank, shape, dtype)`",
            "`pycomm.remote_recv(src)`",
            "shape and dtype are sent, and checked if given; `src_rank=` is accepted",
        ),
        Row(
            "`module.SyncBatchNorm(channels, group=)`",
            "`pycomm.SyncBatchNorm(channels, group=)`",
            "`momentum=0.1` is MegEngine's 0.9; `eval()` of the layer in place of `freeze=True`",
        ),
        Row(
            "samplers that divide the data themselves",
            "`pycomm.data.DataLoader(data, sampler=sampler)`",
            "divides torch's sequential and random samplers; others must know the ranks",
        ),
        Row(
            "slices of ceil(n / size)",
            '`pycomm.data.ShardedSampler(data, shuffle=False, order="contiguous")`',
            "no sample is repeated",
        ),
        Row(
            "the DataLoaders of a host share memory",
            "`pycomm.data.DataLoader(data, shared=True)`",
            "[one decoded copy](data.md#one-decoded-copy-per-host), made in the constructor",
        ),
        Row(
            "a rank exits early, others hang",
            "others raise `PeerLost`",
            "call `pycomm.barrier()` at the end to wait for all",
        ),
    ),
    "Horovod": (
        Row("`hvd.init()`, `rank()`, `size()`, `local_rank()`", "`pycomm.init()`, the same names"),
        Row(
            "`hvd.broadcast_parameters(state, 0)`",
            "`pycomm.bcast_list_(model.parameters())`",
            "`DataParallel` includes it",
            "broadcast_parameters broadcast_optimizer_state",
        ),
        Row(
            "`hvd.allgather(x)`, `hvd.alltoall(x)`",
            "`pycomm.all_gather(x)`, `pycomm.all_to_all(x)`",
            "stacked, not concatenated; `all_gather_v` for different counts",
            "allgather alltoall",
        ),
        Row(
            "`hvd.allreduce_async_(x)`, `hvd.synchronize(handle)`",
            "`pycomm.all_reduce(x, async_op=True).result()`",
            "",
            "allreduce_async allreduce_async_ synchronize",
        ),
        Row(
            "`hvd.broadcast_object(value, 0)`",
            "`pycomm.all_gather_object(value)[0]`",
            "plain values only, no pickle",
            "broadcast_object",
        ),
        Row(
            "`hvd.DistributedOptimizer(opt)`",
            "`pycomm.DataParallel(model)`",
            "wraps the model; no negotiation: all ranks produce gradients in the same order",
            "DistributedOptimizer",
        ),
        Row(
            "`Compression.fp16`",
            '`pycomm.DGC(opt, value_dtype="bfloat16")`',
            "sparse; keeps the rounding error in the residual",
            "Compression",
        ),
        Row(
            "`hvd.allreduce(x, op=hvd.Average)`",
            '`pycomm.all_reduce(x, op="avg")`',
            "in place",
            "allreduce allreduce_ Average Sum",
        ),
        Row("`hvd.SyncBatchNorm(channels)`", "`pycomm.SyncBatchNorm(channels)`"),
        Row("`hvd.join()`", "`with model.join():`"),
        Row("`backward_passes_per_step`", "`with model.no_sync():`"),
        Row(
            "`horovodrun -np 4 -H a:2,b:2`",
            "`pycomm launch --nproc 2 --nnodes 2 --rdzv-endpoint a:29400` on each host",
            "no ssh",
        ),
        Row(
            "elastic training",
            "torchrun's restarts, `group.shrink()` or `group.replace()`",
            "see [rank failures](training.md#rank-failures)",
        ),
    ),
}


def hint(name: str) -> str:
    """A text with pycomm's equivalent of a name of another library, or ""."""
    for system, rows in ROWS.items():
        for row in rows:
            if name in row.names.split():
                return f"{system}'s {_plain(row.theirs)} is {_plain(row.ours)} here"
    return ""


def _plain(markdown: str) -> str:
    """Without the marks of code and links."""
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", markdown).replace("`", "")


def also_named(**others: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for functions whose arguments have other names in other libraries.

    Each of `others` gives the function's own name, and the argument is passed on under it; or, if
    there is no such argument, a sentence that ends the TypeError for its use.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in others.keys() & kwargs.keys():
                where = f"{function.__qualname__.removesuffix('.__init__')}()"
                own = others[name]
                if not own.isidentifier():
                    raise TypeError(f"{where} has no argument {name!r}: {own}")
                if own in kwargs:
                    raise TypeError(f"{where} got {name!r} and {own!r}, which are the same")
                kwargs[own] = kwargs.pop(name)
            return function(*args, **kwargs)

        return call

    return decorate
