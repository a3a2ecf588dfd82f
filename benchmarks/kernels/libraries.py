"""The libraries that `bench kernels` compares with on a GPU besides torch: CUB, Triton, CuPy.

Each selects by an operation that its users would
take, and updates u and v in one loop: CUB after torch.compile's loop, Triton (triton_step.py)
before torch.topk, CuPy by an elementwise kernel and argpartition.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pycomm.bench.kernels.torch_steps import Choose, Step, Tensors, compiled_update, send
from pycomm.errors import Unsupported

SOURCE = Path(__file__).with_name("cub_topk.cu")


@dataclass(frozen=True)
class Library:
    """The functions of a library."""

    step: Step
    choose: Choose | None = None


def _triton() -> Library:
    from benchmarks.kernels import triton_step as triton  # imports triton, which may be missing

    def step(t: Tensors, grad: Tensor) -> Tensor:
        magnitudes = torch.empty_like(t.v)
        triton.update(t.u, t.v, grad, magnitudes, t.momentum)
        return send(t, magnitudes.topk(t.k, sorted=False).indices)

    return Library(step)


def _cub() -> Library:
    if not torch.cuda.is_available():
        raise Unsupported("it is compiled for the GPU that is here, and there is none")
    major, minor = torch.cuda.get_device_capability()
    library = cub(f"sm_{major}{minor}")
    name = library.cub_topk_name().decode()

    def choose(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        magnitudes = x.new_empty(k)
        indices = torch.empty(k, dtype=torch.int32, device=x.device)
        size = ctypes.c_size_t(0)

        def call(workspace: int | None) -> None:
            arrays = (x.data_ptr(), magnitudes.data_ptr(), indices.data_ptr(), x.numel(), k)
            stream = torch.cuda.current_stream(x.device).cuda_stream
            error = library.cub_topk(workspace, ctypes.byref(size), *arrays, stream)
            if error:
                raise RuntimeError(f"{name}: {library.cub_error(error).decode()}")

        call(None)  # the needed workspace
        workspace = torch.empty(size.value, dtype=torch.uint8, device=x.device)
        call(workspace.data_ptr())
        return magnitudes, indices

    def step(t: Tensors, grad: Tensor) -> Tensor:
        compiled_update()(t.u, t.v, grad, t.momentum)
        return send(t, choose(t.v, t.k)[1].long())

    return Library(step, choose)


def cub(arch: str) -> Any:
    """cub_topk.cu, compiled for an architecture such as sm_90 and loaded.

    Raises:
        Unsupported: there is no nvcc, or compilation fails.
    """
    usual = Path("/usr/local/cuda/bin/nvcc")
    nvcc = shutil.which("nvcc") or (str(usual) if usual.exists() else None)
    if nvcc is None:
        raise Unsupported("CUB is compiled by nvcc, which is not on PATH")
    command = [nvcc, "-std=c++20", "-O3", "-shared", "-Xcompiler=-fPIC", f"-arch={arch}"]
    with tempfile.TemporaryDirectory() as folder:  # a loaded library needs no file
        made = Path(folder, "cub_topk.so")
        done = subprocess.run(
            [*command, str(SOURCE), "-o", str(made)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Unsupported(f"nvcc does not compile {SOURCE.name}: {done.stderr.strip()}")
        library = ctypes.CDLL(str(made))
    library.cub_topk_name.restype = library.cub_error.restype = ctypes.c_char_p
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.cub_topk.argtypes = [pointer] * 5 + [number] * 2 + [pointer]
    return library


def _cupy() -> Library:
    cupy: Any = importlib.import_module("cupy")
    update = cupy.ElementwiseKernel(
        "float32 g, float32 m",
        "float32 u, float32 v, float32 magnitude",
        "u = m * u + g; v += u; magnitude = fabsf(v)",
        "dgc_update",
    )

    def choose(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        with _on_stream(cupy, x):
            there = cupy.from_dlpack(x)
            indices = cupy.argpartition(cupy.abs(there), x.numel() - k)[x.numel() - k :]
            return from_dlpack(there[indices]), from_dlpack(indices)

    def step(t: Tensors, grad: Tensor) -> Tensor:
        with _on_stream(cupy, grad):
            u, v, g = (cupy.from_dlpack(x) for x in (t.u, t.v, grad))
            magnitudes = cupy.empty_like(v)
            update(g, cupy.float32(t.momentum), u, v, magnitudes)
            indices = cupy.argpartition(magnitudes, g.size - t.k)[g.size - t.k :]
            values = v[indices]
            u[indices] = 0
            v[indices] = 0
            return from_dlpack(values)

    return Library(step, choose)


def _on_stream(cupy: Any, x: Tensor) -> Any:
    """Makes CuPy use torch's current stream."""
    return cupy.cuda.ExternalStream(torch.cuda.current_stream(x.device).cuda_stream)


LOADERS: dict[str, Callable[[], Library]] = {"CUB": _cub, "Triton": _triton, "CuPy": _cupy}
"""Each raises ImportError or Unsupported where its library is missing."""
