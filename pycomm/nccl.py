"""NCCL, NVIDIA's collective library: where it is looked for and which one there is.

It is opened at run time by `_cuda` and never linked, so that nothing here needs it. Called by
`pycomm info` and by device_groups.py.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from pycomm.errors import Unsupported

PACKAGE = "nvidia-nccl-cu13"
LIBRARY = "libnccl.so.2"

__all__ = ["described", "load", "places"]


def places() -> list[tuple[str, str, bool]]:
    """Where the library may be, first choice first: (in words, what dlopen gets, only if loaded).

    A copy that the process has already, which is torch's, comes first: one library for both.
    """
    return [
        (f"a {LIBRARY} that is loaded, as torch's", LIBRARY, True),
        (f"the package {PACKAGE}", _in_package(), False),
        (f"the system's {LIBRARY}", LIBRARY, False),
    ]


def _in_package() -> str:
    """The package's library; empty where it is not installed."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:  # the loader looks elsewhere
        return ""
    return str(Path(str(package.locate_file(f"nvidia/nccl/lib/{LIBRARY}"))))


def load(module: Any = None) -> Any:
    """The library, opened: `.version` ("2.32.3"), `.origin` (its file), `.unique_id()`.

    Args:
        module: what opens it; None: `_cuda`.

    Raises:
        Unsupported: `_cuda` is not built, or no place has a library with all that is needed; says
            what was wrong at each place.
    """
    if module is None:
        if importlib.util.find_spec("pycomm._cuda") is None:
            raise Unsupported("not looked for: pycomm._cuda is not built")
        module = importlib.import_module("pycomm._cuda")
    return module.nccl.load(places())


def described() -> str:
    """Version and file, or why there is none, in a line."""
    try:
        library = load()
    except Unsupported as error:
        return f"no: {error}"
    return f"{library.version}, {library.origin}"
