"""The libraries that `bench kernels` compares with on a GPU besides torch: CUB, Triton, CuPy.

Each selects by an operation that its users would take, and updates u and v in one loop: CUB's sort,
which is torch's on a GPU, after torch.compile's loop, Triton (triton_step.py) before torch.topk,
CuPy by an elementwise kernel and argpartition.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pycomm.bench.kernels.torch_steps import Choose, Step, Tensors, compiled_update, send


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


def _sort() -> Library:
    def choose(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        found = x.abs().sort(descending=True)
        return found.values[:k], found.indices[:k]

    def step(t: Tensors, grad: Tensor) -> Tensor:
        magnitudes = compiled_update()(t.u, t.v, grad, t.momentum)
        return send(t, magnitudes.sort(descending=True).indices[: t.k])

    return Library(step, choose)


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


LOADERS: dict[str, Callable[[], Library]] = {"CUB sort": _sort, "Triton": _triton, "CuPy": _cupy}
"""Each raises ImportError where its library is missing."""
