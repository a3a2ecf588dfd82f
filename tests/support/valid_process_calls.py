"""Valid calls of the functions of a process and of its files, and of torch's backend, as in
valid_calls.py."""

import os
from datetime import timedelta
from typing import Any

import torch
from malformed import Valid
from torch import nn
from torch.distributed import HashStore
from valid_training import layer, sgd

import pycomm
from pycomm import Group, torch_backend

SECRET = "0123456789abcdef" * 4


def rank_of(group: Group) -> int:
    return group.rank


def saved(group: Group) -> str:
    path = os.path.abspath(f"saved{group.rank}.pt")  # rank 0 reads its own, while others write
    torch.save({"x": torch.ones(3)}, path)
    return path


def loader(_: Group) -> dict[str, Any]:
    return {"dataset": [1, 2, 3]}


# Calls of a process without a group.
PROCESS: dict[str, Valid] = {
    "init": lambda _: {"rank": 0, "size": 1, "timeout_s": 20.0, "secret": SECRET},
    # The file has no addresses, so no call waits for a group.
    "join": lambda _: {"file": __file__, "timeout_s": 0.01, "secret": SECRET},
    "testing.run_ranks": lambda _: {"n": 1, "fn": rank_of, "timeout_s": 20.0},
    "testing.FaultPlan": lambda _: {"rank": 0, "action": "delay"},
    "launcher": lambda _: {"nproc": 1},
    "launcher of a function": lambda _: {"*": (rank_of,)},
    "plan": lambda _: {
        **{"model": nn.Linear(3, 2), "step": dict, "ranks": [2], "gbit": [1.0]},
        "sparsity": 0.9,
    },
    "torch_backend.stats": lambda _: {},
    "torch_backend.create": lambda _: {"options": None, "backend_options": None},
    "torch_backend.merge": lambda _: {
        **{"store": HashStore(), "ours": torch_backend.Options(), "rank": 1, "size": 1},
    },
    "torch_backend.shrink": lambda _: {
        **{"part": None, "store": HashStore(), "excluded": [0], "ours": torch_backend.Options()},
    },
    "dgc_hook": lambda _: {"dgc": pycomm.DGC(sgd(layer())), "bucket": None},
    "quantize_hook": lambda _: {
        **{"quantized": pycomm.QuantizedGradients(layer().named_parameters()), "bucket": None},
    },
    "quantize_hsdp": lambda _: {"model": layer(), "replicas": None},
    "torch_backend.Options": lambda _: {"timeout": timedelta(seconds=20)},
    "torch_backend.replace": lambda _: {"name": "gloo", "except_": "mesh_*"},
    "torch_backend.restore": lambda _: {"name": "gloo"},  # after replace()
}
# Calls of the ranks of a group. On two ranks both ranks make each call.
FILES: dict[str, Valid] = {
    "save": lambda g: {"path": os.path.abspath("kept.pt"), "obj": 1, "group": g},
    "load": lambda g: {"path": saved(g), "group": g},
    "data.DataLoader": loader,
    "data.DataLoader.set_epoch": lambda g: {
        **{"self": pycomm.data.DataLoader(**loader(g)), "epoch": 1},
    },
    "data.ShardedSampler.set_epoch": lambda g: {
        **{"self": pycomm.data.ShardedSampler([1, 2], rank=g.rank, size=g.size), "epoch": 1},
    },
    "data.ScatterLoader": lambda g: {
        **{"loader": [torch.ones(2)] if g.rank == 0 else None, "group": g},
    },
}
