"""Selects the compiled module for the arrays of a device, and the stream of a call.

Both modules have the same functions with the same arguments: `_core.kernels` (host memory) and
`_cuda.kernels` (CUDA), bound by csrc/bindings/kernels.h. Tests replace one of them through
`override_kernels` to run emulated kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from pycomm import _core
from pycomm._arguments import integer
from pycomm._core_api.arrays import Device, current_stream
from pycomm.errors import Unsupported

HOW_TO_BUILD = (
    "the CUDA kernels (pycomm._cuda) are not built here: the build needs nvcc. Add the CUDA "
    "toolkit's bin folder to PATH and build again (make build, or pip install .)"
)

_modules: dict[str, Any] = {"cpu": _core.kernels}


def module(device: Device) -> Any:
    """The compiled functions for arrays on `device`; raises Unsupported if they are not built."""
    if device.kind not in _modules:
        _modules["cuda"] = cuda_module().kernels
    return _modules[device.kind]


def has_cuda_module() -> bool:
    """Whether the compiled module `_cuda` was built."""
    return importlib.util.find_spec("pycomm._cuda") is not None


def cuda_module() -> Any:
    """The compiled module `_cuda`; raises Unsupported if it is not built."""
    if not has_cuda_module():
        raise Unsupported(HOW_TO_BUILD)
    return importlib.import_module("pycomm._cuda")


@contextlib.contextmanager
def override_kernels(kind: str, by: Any) -> Iterator[None]:
    """Uses module `by` for arrays on devices of `kind`, "cpu" or "cuda", inside the block.

    Emulated kernels work on host memory: `with override_kernels("cpu", emulated.kernels): ...`. The
    override is process-wide, so it is for tests only.
    """
    before = _modules.get(kind)
    _modules[kind] = by
    try:
        yield
    finally:
        if before is None:
            del _modules[kind]
        else:
            _modules[kind] = before


def empty_caches() -> None:
    """Frees the device memory that torch and CuPy keep for later arrays."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()


def set_num_threads(n: int) -> None:
    """Sets the number of threads of `pycomm.kernels` for large arrays; results do not depend on it.

    Args:
        n: from 1; the default is the number of processors that the process may use.

    Raises:
        InvalidArgument: `n` is below 1.
    """
    _core.set_kernel_threads(min(integer("n", n, 1), 2**31 - 1))


def queue(device: Device, array: Any) -> tuple[int, int]:
    """(device index, the caller's current stream on it), for an array of the call."""
    if device.kind == "cpu":
        return 0, 0
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return device.index, int(current_stream(device.index).cuda_stream)
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        with cupy.cuda.Device(device.index):
            return device.index, int(cupy.cuda.get_current_stream().ptr)
    # Other libraries name their stream; 1 and 2 are CUDA's names of the default streams.
    return device.index, array.__cuda_array_interface__.get("stream") or 0
