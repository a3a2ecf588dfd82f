"""DeepSpeed's all-reduce through shared memory as a peer: the operator by which its inference on
CPUs adds up, which DeepSpeed compiles when it is first used.

Called by collectives.py (what is missing) and peers.py (calls).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs hide it

from benchmarks.verbs import Arrays, Call

NAME = "deepspeed"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # it leaves others as they are, in silence


def missing() -> str:
    """Why it cannot be measured here; empty if it can."""
    if importlib.util.find_spec(NAME) is None:
        return f"{NAME} is not installed: pip install --no-build-isolation {NAME}"
    return ""


def load(store: Store, rank: int, size: int) -> None:
    """Compiles the operator where that is still to be done, and makes it ready on every rank."""
    if rank == 0:
        store.set(NAME, secrets.token_hex(8))
    # Its segments' names are made of these, and are found again by whoever uses the same.
    os.environ |= {"LOCAL_SIZE": str(size), "MASTER_ADDR": store.get(NAME).decode()}
    os.environ["MASTER_PORT"] = "0"
    builders = importlib.import_module("deepspeed.ops.op_builder.cpu.comm")
    builders.ShareMemCommBuilder().load(verbose=False).initialize(size, rank)
    if store.add(f"{NAME}/open", 1) == size:  # all have mapped them; it would leave them behind
        for segment in Path("/dev/shm").glob(f"{NAME}_*_{os.environ['MASTER_ADDR']}_*"):
            segment.unlink()


def call(arrays: Arrays) -> Call:
    """The verb on our arrays."""
    if arrays.case.verb != "all_reduce" or arrays.dtype not in DTYPES:
        raise NotImplementedError(f"{NAME} has all_reduce alone, of floats of 16 and 32 bits")
    reduce = torch.ops.deepspeed.inference_all_reduce_
    x = arrays.input
    return lambda: reduce(x)
