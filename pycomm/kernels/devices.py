"""Which compiled module serves the arrays of a device, and the queue that a call joins there.

Every module has the same functions with the same arguments: `_core.kernels` (host memory) and
`_cuda.kernels` (CUDA), both bound by csrc/bindings/kernels.h. `override_kernels` puts another in
place of one of them: the one way for tests to run kernels that are emulated. Called by the package.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from pycomm import _core
from pycomm.arrays import Device, current_stream
from pycomm.errors import Unsupported

HOW_TO_BUILD = (
    "the CUDA kernels (pycomm._cuda) are not built here: they are built where nvcc is found, so "
    "put the CUDA toolkit's bin folder on PATH and build again (make build, or pip install .)"
)

_modules: dict[str, Any] = {"cpu": _core.kernels}


def module(device: Device) -> Any:
    """The compiled functions for arrays on `device`; raises Unsupported where there are none."""
    found = _modules.get(device.kind)
    if found is None:
        if importlib.util.find_spec("pycomm._cuda") is None:
            raise Unsupported(HOW_TO_BUILD)
        found = _modules["cuda"] = importlib.import_module("pycomm._cuda").kernels
    return found


@contextlib.contextmanager
def override_kernels(kind: str, by: Any) -> Iterator[None]:
    """Within it, arrays on devices of this kind, "cpu" or "cuda", are served by the module `by`.

    Emulated kernels work on host memory: `with override_kernels("cpu", emulated.kernels): ...`. For
    the whole process, and so for tests only.
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


def queue(device: Device, array: Any) -> tuple[int, int]:
    """(number of the device, the caller's current stream there), for an array of the call."""
    if device.kind == "cpu":
        return 0, 0
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return device.index, int(current_stream(device.index).cuda_stream)
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        with cupy.cuda.Device(device.index):
            return device.index, int(cupy.cuda.get_current_stream().ptr)
    # Others say on which stream they are used; 1 and 2 are CUDA's own names of default streams.
    return device.index, array.__cuda_array_interface__.get("stream") or 0
