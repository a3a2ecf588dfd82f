"""Lets a test written for GPUs run on CPU tensors: tensors that it puts on a GPU stay on the CPU.

This does not emulate CUDA: streams, events and memory statistics are absent, and a test that needs
them fails. torch_suite.py calls install() in the processes of such a test.
"""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

IGNORED = ("set_device", "synchronize", "empty_cache", "_sleep")


def _to_cpu(value: Any) -> Any:
    """The CPU for a GPU device; any other device unchanged."""
    named = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return torch.device("cpu") if named else value


def _to_cpu_or_index(value: Any) -> Any:
    """The same, where a bare number means a GPU as well."""
    return torch.device("cpu") if type(value) is int else _to_cpu(value)


class _DeviceToCpu(TorchFunctionMode):
    """Replaces the device of every torch call by the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(_to_cpu_or_index, args[1:]))
        if named.get("device") is not None:
            named["device"] = _to_cpu_or_index(named["device"])
        return func(*map(_to_cpu, args), **named)


def install(suite: ModuleType, world_size: int) -> None:
    """Takes effect for the rest of this process. Each rank sees the GPU of its own number."""
    gpus = {rank: [rank] for rank in range(world_size)}
    suite.init_multigpu_helper = lambda *_args: gpus
    for name in IGNORED:
        setattr(torch.cuda, name, lambda *_args, **_kwargs: None)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = contextlib.nullcontext  # type: ignore[assignment, misc]  # a stub, like all below

    move, wrap = torch.nn.Module.to, DistributedDataParallel.__init__

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        named = {n: _to_cpu_or_index(v) if n == "device" else v for n, v in kwargs.items()}
        return move(self, *map(_to_cpu_or_index, args), **named)

    @functools.wraps(wrap)
    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **named: Any
    ) -> None:
        wrap(self, module, None, None, **named)

    torch.nn.Module.to = to  # type: ignore[assignment]  # stubs, also the next two
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[assignment]
    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    _DeviceToCpu().__enter__()
