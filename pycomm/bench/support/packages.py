"""The optional packages that commands need, and how to install those that are missing."""

from __future__ import annotations

import importlib.util

REQUIREMENTS = {"torch": "torch>=2.11", "rich": "rich>=13", "matplotlib": "matplotlib>=3.8"}
"""As in pyproject.toml: the extras [torch] and [bench]."""


def missing(*names: str) -> str:
    """A sentence that names those of the packages that are not installed, or ""."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    wanted = " ".join(f'"{REQUIREMENTS[name]}"' for name in absent)
    return f"needs {' and '.join(absent)}: pip install {wanted}" if absent else ""
