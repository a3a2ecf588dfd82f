"""DeepSpeed's all-reduce through shared memory as a peer: the operator of its inference on CPUs,
which DeepSpeed compiles on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs hide it

from pycomm.bench.collectives.verbs import Call

NAME = "deepspeed"


def missing() -> str:
    """The reason why it cannot be measured here, or ""."""
    if importlib.util.find_spec(NAME) is None:
        return f"{NAME} is not installed: pip install --no-build-isolation {NAME}"
    return ""


def load(store: Store, rank: int, size: int) -> None:
    """Compiles the operator if needed, and initialises it on every rank."""
    if rank == 0:
        store.set(NAME, secrets.token_hex(8))
    # These form the names of its segments; another process with the same names would find them.
    os.environ |= {"LOCAL_SIZE": str(size), "MASTER_ADDR": store.get(NAME).decode()}
    os.environ["MASTER_PORT"] = "0"
    builders = importlib.import_module("deepspeed.ops.op_builder.cpu.comm")
    builders.ShareMemCommBuilder().load(verbose=False).initialize(size, rank)
    if store.add(f"{NAME}/open", 1) == size:  # all have mapped them; DeepSpeed does not remove them
        for segment in Path("/dev/shm").glob(f"{NAME}_*_{os.environ['MASTER_ADDR']}_*"):
            segment.unlink()


def call(x: Tensor) -> Call:
    """all_reduce of `x`, in place."""
    reduce = torch.ops.deepspeed.inference_all_reduce_
    return lambda: reduce(x)
