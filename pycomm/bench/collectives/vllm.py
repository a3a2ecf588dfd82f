"""vLLM's all-reduce through shared memory as a peer: the operator of its inference on CPUs.

Only the compiled library of the package is loaded, so that its dependencies are not needed.
"""

from __future__ import annotations

import importlib.util
import secrets
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs hide it

from pycomm.bench.collectives.verbs import Call

NAME = "vllm"
THREADS = 1  # of each rank, as in all runs
HANDLE = 0  # of the first group of a process; a run makes one


def missing() -> str:
    """The reason why it cannot be measured here, or ""."""
    if _library() is None:
        return f"{NAME} for CPUs is not installed: pip install --no-deps {NAME}-cpu"
    return ""


def load(store: Store, rank: int, size: int) -> None:
    """Loads the operator, and initialises it on every rank."""
    torch.ops.load_library(_library())  # type: ignore[no-untyped-call]  # torch has no type here
    if rank == 0:
        store.set(NAME, f"{NAME}-{secrets.token_hex(8)}")
    name = store.get(NAME).decode()  # its segments have names that start with this
    torch.ops._C.init_shm_manager(name, size, rank, THREADS)
    dist.barrier()
    torch.ops._C.join_shm_manager(HANDLE, name)
    dist.barrier()
    Path(f"/dev/shm/{name}_{rank}").unlink()  # all have mapped it; a killed rank would leave it


def call(x: Tensor) -> Call:
    """all_reduce of `x`, in place."""
    reduce = torch.ops._C.shm_allreduce
    return lambda: reduce(HANDLE, x)


def _library() -> Path | None:
    """The library that vLLM takes on this processor."""
    found = importlib.util.find_spec(NAME)
    if found is None or not found.submodule_search_locations:
        return None
    name = "_C"
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        name = "_C_AVX2"
    elif not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512"
    path = Path(found.submodule_search_locations[0], f"{name}.abi3.so")
    return path if path.exists() else None
