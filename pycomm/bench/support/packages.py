"""The parts that an installation may lack: optional packages, and the repository's benchmarks."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

REQUIREMENTS = {"torch": "torch>=2.11", "matplotlib": "matplotlib>=3.8", "shtab": "shtab>=1.7"}
"""As in pyproject.toml: the extras [torch], [bench] and [completion]."""
ROOT = Path(__file__).resolve().parents[3]


def missing(*names: str) -> str:
    """A sentence that names those of the packages that are not installed, or ""."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    wanted = " ".join(f'"{REQUIREMENTS[name]}"' for name in absent)
    return f"needs {' and '.join(absent)}: pip install {wanted}" if absent else ""


def is_here(module: str) -> bool:
    """Whether a module of pycomm or of its repository's `benchmarks` can be imported."""
    file = Path(*module.split(".")).with_suffix(".py")
    if not any(Path(place, file).is_file() for place in sys.path):
        if not (ROOT / file).is_file():
            return False
        sys.path.append(str(ROOT))  # which the command `pycomm` does not search
    return True


def in_repository(module: str) -> Any:
    """A module of the repository's `benchmarks`; None if pycomm is installed without it."""
    return importlib.import_module(module) if is_here(module) else None
