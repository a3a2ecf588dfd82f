"""Kernels of sparse training for torch tensors, NumPy arrays and CuPy arrays; no group is needed.

A kernel runs on the device of its arrays: the host, or CUDA on the caller's current stream. Results
have the same bits on every device. The caller can pass every buffer that a kernel needs. Arguments
are checked before anything changes, and arrays must be contiguous. `pycomm.reference` defines each
kernel in NumPy.

Errors of all kernels: InvalidArgument for a wrong dtype, shape, range or layout, for arrays on
several devices and for outputs that share memory with other arguments. Unsupported for CUDA arrays
if the CUDA kernels are not built, and for arrays of another kind.
"""

from pycomm.kernels.batch import (
    GroupBatch,
    PacketBatch,
    decode_batch,
    encode_batch,
    read_groups,
)
from pycomm.kernels.dense import cast, clip_, clip_scale, norm, norm_workspace, reduce_
from pycomm.kernels.groups import (
    GroupPackets,
    encode_groups,
    topk_groups,
    update_rollback,
    update_step,
)
from pycomm.kernels.packets import (
    decode_sum,
    decode_update,
    encode,
    packet_bytes,
    scatter_add,
    unpack,
)
from pycomm.kernels.quantized import dequantize, quantize, quantized_bytes
from pycomm.kernels.selection import threshold, topk, topk_workspace
from pycomm.kernels.step import dgc_rollback, dgc_step, dgc_workspace, momentum_mask

__all__ = [
    "GroupBatch",
    "GroupPackets",
    "PacketBatch",
    "cast",
    "clip_",
    "clip_scale",
    "decode_batch",
    "decode_sum",
    "decode_update",
    "dequantize",
    "dgc_rollback",
    "dgc_step",
    "dgc_workspace",
    "encode",
    "encode_batch",
    "encode_groups",
    "momentum_mask",
    "norm",
    "norm_workspace",
    "packet_bytes",
    "quantize",
    "quantized_bytes",
    "read_groups",
    "reduce_",
    "scatter_add",
    "threshold",
    "topk",
    "topk_groups",
    "topk_workspace",
    "unpack",
    "update_rollback",
    "update_step",
]
