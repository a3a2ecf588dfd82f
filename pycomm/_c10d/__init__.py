"""The backend for torch.distributed, compiled for several versions of torch. Private.

torch's C++ interface of backends (c10d) changes with each minor version and is the same in all
patch releases of one. This folder has a module torch_<major>_<minor> for each version that the
package was built for, and `load` imports the one that fits. compiled.pyi describes them all.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path
from typing import Any

from pycomm.errors import Unsupported

OLDEST = (2, 11)
BUILD = (
    "build it: pip install setuptools ninja pybind11; pip install --force-reinstall --no-deps "
    "--no-build-isolation --no-binary pycomm-collectives pycomm-collectives (in a clone of the "
    "repository: make build)"
)


def versions() -> list[tuple[int, int]]:
    """The minor versions of torch for which there is a module, sorted."""
    names = [file.name for file in Path(__file__).parent.glob("torch_*.so")]
    found = [re.match(r"torch_(\d+)_(\d+)\.", name) for name in names]
    return sorted({(int(match[1]), int(match[2])) for match in found if match})


def why_not(torch: str) -> str:
    """Why there is no module for this version of torch, with a remedy, or "" if there is one."""
    major, minor = (int(number) for number in re.findall(r"\d+", torch)[:2])
    if (major, minor) in versions():
        return ""
    if (major, minor) < OLDEST:
        return f"torch {torch} is too old: install torch {OLDEST[0]}.{OLDEST[1]} or newer"
    built = ", ".join(f"{major}.{minor}" for major, minor in versions()) or "no version"
    return f"pycomm's torch backend is not compiled for torch {torch} (for: {built}); {BUILD}"


def load() -> Any:
    """The module for the installed torch, as in compiled.pyi. Raises Unsupported if none fits."""
    version = importlib.metadata.version("torch")
    why = why_not(version)
    if why:
        raise Unsupported(why)
    major, minor = re.findall(r"\d+", version)[:2]
    importlib.import_module("torch")  # whose symbols the module uses
    try:
        return importlib.import_module(f"pycomm._c10d.torch_{major}_{minor}")
    except ImportError as error:  # raised below, with a remedy
        raise Unsupported(
            f"pycomm's torch backend cannot be loaded with torch {version} ({error}); {BUILD}"
        ) from error
