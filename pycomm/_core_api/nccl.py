"""NCCL, NVIDIA's collective library: search path and version.

`_cuda` opens it at run time and never links it, so pycomm works without NCCL.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from pycomm import config
from pycomm._core_api import devices
from pycomm.errors import Unsupported

PACKAGE = "nvidia-nccl-cu13"
LIBRARY = "libnccl.so.2"


def places() -> list[tuple[str, str, bool]]:
    """Where to search, in order: (description, argument of dlopen, only if already loaded).

    A copy that the process has already loaded, which is torch's, comes first: both share it.
    """
    return [
        (f"a loaded {LIBRARY}, such as torch's", LIBRARY, True),
        (f"the package {PACKAGE}", _in_package(), False),
        (f"the system's {LIBRARY}", LIBRARY, False),
    ]


def _in_package() -> str:
    """The package's library; empty if it is not installed."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # the loader looks elsewhere
        return ""
    return str(Path(str(package.locate_file(f"nvidia/nccl/lib/{LIBRARY}"))))


def load(module: Any = None) -> Any:
    """Opens the library: `.version` ("2.32.3"), `.origin` (its file), `.unique_id()`.

    Args:
        module: the module that opens it; None: `_cuda`.

    Raises:
        Unsupported: `_cuda` is not built, or no place has a complete library; the text lists each
            place and why it failed. Or the environment forbids what pycomm needs of NCCL.
    """
    if setting := config.nccl_prevents_aborts():
        raise Unsupported(
            f"{setting}: a call that waits for a lost rank could not be cancelled; unset it, or "
            "remove it from nccl.conf"
        )
    if module is None:
        if not devices.has_cuda_module():
            raise Unsupported("NCCL not searched: pycomm._cuda is not built")
        module = devices.cuda_module()
    return module.nccl.load(places())


def described() -> str:
    """Version and file in one line, or why there is none."""
    try:
        library = load()
    except Unsupported as error:
        return f"no: {error}"
    return f"{library.version}, {library.origin}"
