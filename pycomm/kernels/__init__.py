"""The kernels of sparse training, to be used alone: torch tensors, NumPy and CuPy arrays.

Each works where the arrays lie (host memory, or CUDA on the caller's current stream), gives the
same bits there, allocates nothing that the caller cannot pass in, and checks what it is given
before anything changes. Arrays are contiguous. `pycomm.reference` has the NumPy meaning of each.
"""

from pycomm.kernels.batch import PacketBatch, decode_batch, encode_batch
from pycomm.kernels.compact import codec_workspace
from pycomm.kernels.dense import cast, clip_, clip_scale, norm, norm_workspace, reduce_
from pycomm.kernels.packets import (
    decode_sum,
    decode_update,
    encode,
    packet_bytes,
    scatter_add,
    unpack,
)
from pycomm.kernels.selection import threshold, topk, topk_workspace
from pycomm.kernels.step import dgc_rollback, dgc_step, dgc_workspace, momentum_mask

__all__ = [
    "PacketBatch",
    "cast",
    "clip_",
    "clip_scale",
    "codec_workspace",
    "decode_batch",
    "decode_sum",
    "decode_update",
    "dgc_rollback",
    "dgc_step",
    "dgc_workspace",
    "encode",
    "encode_batch",
    "momentum_mask",
    "norm",
    "norm_workspace",
    "packet_bytes",
    "reduce_",
    "scatter_add",
    "threshold",
    "topk",
    "topk_workspace",
    "unpack",
]
