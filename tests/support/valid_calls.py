"""Valid calls of the names in docs/reference, which tests/support/malformed.py makes malformed.

A name is a function, a class or a method. Its value makes new arguments for each call. Parameters
with a default that it leaves out are made malformed too.
"""

from typing import Any

import numpy as np
import torch
from malformed import Valid

import pycomm
from pycomm import Group, kernels


def x(n: int = 3) -> Any:
    return np.arange(n, dtype=np.float32)


def rows(group: Group) -> Any:
    return np.zeros((group.size, 3), np.float32)


def common(group: Group, **more: Any) -> dict[str, Any]:
    return {**more, "group": group, "timeout_s": 20.0}


def message(group: Group, peer: str) -> dict[str, Any]:
    return {"x": x(), peer: 1 - group.rank, "tag": 1, "group": group, "timeout_s": 20.0}


def stored(group: Group) -> dict[str, Any]:
    pycomm.user_set("k", 1, group=group)
    return {"key": "k", "timeout_s": 0.01, "group": group}


# The arguments of a valid call. On two ranks both ranks make it.
VALID: dict[str, Valid] = {
    "all_reduce": lambda g: common(g, x=x()),
    "reduce": lambda g: common(g, x=x(), dst=0),
    "broadcast": lambda g: common(g, x=x()),
    "all_gather": lambda g: common(g, x=x(), out=rows(g)),
    "all_gather_v": lambda g: common(g, x=x(), out=[x() for _ in range(g.size)]),
    "gather": lambda g: common(g, x=x(), dst=0, out=rows(g) if g.size == 1 else None),
    "reduce_scatter": lambda g: common(g, x=rows(g), out=x()),
    "scatter": lambda g: common(g, x=rows(g), out=x()),
    "all_to_all": lambda g: common(g, x=rows(g), out=rows(g)),
    "barrier": common,
    "bcast_list_": lambda g: {"tensors": [torch.zeros(3)], "group": g},
    "all_gather_object": lambda g: {"value": 1, "group": g},
    "user_set": lambda g: {"key": "k", "value": 1, "group": g},
    "functional.all_reduce": lambda g: {"x": torch.ones(3), "group": g},
    "functional.all_gather": lambda g: {"x": torch.ones(3), "group": g},
    "metrics.accuracy": lambda _: {"scores": torch.zeros(4, 3), "labels": torch.zeros(4).long()},
    "metrics.Mean": lambda g: {"group": g},
    "metrics.Accuracy": lambda g: {"topk": (1,), "group": g},
    "data.share": lambda g: {"array": x(), "group": g},
    "data.ShardedSampler": lambda g: {"data": [1, 2, 3], "rank": g.rank, "size": g.size},
    "data.InfiniteSampler": lambda _: {"sampler": pycomm.data.ShardedSampler([1], rank=0, size=1)},
    "data.Prefetcher": lambda _: {"loader": [torch.ones(2)]},
    "make_allreduce_cb": lambda g: {"op": "sum", "group": g},
    "testing.status": lambda g: {"group": g},
    "Quantize": lambda _: {},
    "TopK": lambda _: {"density": 0.1},
}
# The same of calls that one rank makes.
ALONE: dict[str, Valid] = {
    "send": lambda g: message(g, "dst"),
    "recv": lambda g: message(g, "src"),
    "empty": lambda _: {"shape": 3, "dtype": "float32"},
    "remote_send": lambda g: {"x": torch.ones(3), "dst": 1, "group": g},
    "remote_recv": lambda g: {"src": 1, "shape": (3,), "dtype": torch.float32, "group": g},
    "user_get": stored,
    "user_pop": stored,
}


def positions() -> Any:
    return np.array([1, 5], np.int32)


def pair() -> dict[str, Any]:
    return {"indices": positions(), "values": x(2)}


def packet(codec: str = "raw") -> Any:
    return kernels.encode(positions(), x(2), 100, codec=codec)


def batch() -> kernels.PacketBatch:
    return kernels.PacketBatch(positions(), x(2), [1, 1])


def encoded() -> dict[str, Any]:
    packets = kernels.encode_batch(batch(), [100], "float32")
    sizes = [len(packet) for packet in packets]
    lengths = {"lengths": batch().lengths, "counts": [100]}
    return {"packets": np.concatenate(packets), "sizes": sizes, **lengths}


def step_arrays(k: int = 3) -> dict[str, Any]:
    return {"grad": x(100), "u": x(100), "v": x(100), "k": k}


def dgc_step(_: Group) -> dict[str, Any]:
    given = step_arrays()
    buffers = {"indices": np.zeros(3, np.int32), "values": x(3), "u_values": x(3)}
    workspace = kernels.dgc_workspace(given["u"], given["v"], 3)
    return {
        **{**given, "weight": x(100), "momentum": 0.9, "weight_decay": 0.1, **buffers},
        **{"found_inf": np.zeros(1, np.float32), "workspace": workspace},
    }


def update() -> dict[str, Any]:
    return {"theta": x(100), "param": np.zeros(100, np.float32), "residual": x(100), "k": 3}


def updated() -> dict[str, Any]:
    (packet,) = kernels.encode_groups(x(100), positions()).packets
    return {"packets": packet, "sizes": [len(packet)], "lengths": [2], "counts": [7]}


def decoded(target: str) -> dict[str, Any]:
    packets = [(positions(), x(2)), (positions(), x(2))]
    return {target: x(100), "packets": packets}


def bytes_of(n: int) -> Any:
    return np.zeros(n, np.uint8)


# Kernels need no group.
KERNELS: dict[str, Valid] = {
    "set_num_threads": lambda _: {"n": 1},
    "kernels.topk": lambda _: {
        **{"x": x(100), "k": 3, "indices": np.zeros(3, np.int32), "values": x(3)},
        "workspace": kernels.topk_workspace(x(100), 3),
    },
    "kernels.threshold": lambda _: {
        **{"x": x(100), "k": 3, "out": x(1), "workspace": kernels.topk_workspace(x(100), 3)},
    },
    "kernels.topk_workspace": lambda _: {"x": x(100), "k": 3},
    "kernels.dgc_step": dgc_step,
    "kernels.dgc_rollback": lambda _: {
        **{"u": x(100), "v": x(100), **pair(), "u_values": x(2)},
        "found_inf": np.zeros(1, np.float32),
    },
    "kernels.momentum_mask": lambda _: {"u": x(100), "v": x(100), "indices": positions()},
    "kernels.dgc_workspace": lambda _: {"u": x(100), "v": x(100), "k": 3},
    "kernels.update_step": lambda _: update(),
    "kernels.encode_groups": lambda _: {"x": x(100), "indices": positions(), "split": [1]},
    "kernels.update_rollback": lambda _: {
        **{"residual": x(100), "indices": np.array([1], np.int32), "values": x(16)},
    },
    "kernels.topk_groups": lambda _: {"x": x(100), "k": 3},
    "kernels.read_groups": lambda _: updated(),
    "kernels.encode": lambda _: {
        **{**pair(), "count": 100, "residual": x(100), "out": bytes_of(kernels.packet_bytes(2))},
    },
    "kernels.unpack": lambda _: {"packet": packet("list"), "codec": "list"},
    "kernels.decode_sum": lambda _: decoded("out"),
    "kernels.decode_sum of groups": lambda _: {
        **{"out": x(100), "packets": kernels.read_groups(**updated()), "scale": 1.0},
    },
    "kernels.decode_sum of a batch": lambda _: {"out": x(100), "packets": batch()},
    "kernels.decode_update": lambda _: {**decoded("param"), "lr": 0.1},
    "kernels.scatter_add": lambda _: {"out": x(100), **pair()},
    "kernels.packet_bytes": lambda _: {"k": 3, "count": 100},
    "kernels.encode_batch": lambda _: {"batch": batch(), "counts": [100], "value_dtype": "float32"},
    "kernels.decode_batch": lambda _: encoded(),
    "kernels.quantize": lambda _: {
        **{"x": x(100), "bits": 3, "residual": x(100)},
        "out": bytes_of(kernels.quantized_bytes(100, 3)),
    },
    "kernels.dequantize": lambda _: {
        **{"packet": kernels.quantize(x(100), 3), "bits": 3, "out": x(100)},
    },
    "kernels.quantized_bytes": lambda _: {"count": 100, "bits": 3},
    "kernels.norm": lambda _: {
        **{"x": x(100), "out": np.zeros(1), "workspace": kernels.norm_workspace(x(100))},
    },
    "kernels.norm_workspace": lambda _: {"x": x(100)},
    "kernels.clip_scale": lambda _: {"norms": np.ones(2), "limit": 1.0, "out": x(2)},
    "kernels.clip_": lambda _: {"x": x(100), "limit": 1.0},
    "kernels.cast": lambda _: {"x": x(100), "dtype": "float16", "out": np.zeros(100, np.float16)},
    "kernels.reduce_": lambda _: {"out": x(), "xs": [x(), x()]},
}
